-- Creates a Replay of all dead letters that counts them and moves nothing. Its status.run.preview has the causes;
-- `kubectl redrive replay` moves messages, after the same plan and a question.
local os = require("os")

-- The time to the minute: two clicks in a minute make one plan. A name has at most 63 characters.
local suffix = "-plan-" .. os.date("!%Y%m%d%H%M")
local prefix = obj.metadata.name
if #prefix + #suffix > 63 then
  prefix = obj.metadata.uid
end

local plan = {
  apiVersion = obj.apiVersion,
  kind = "Replay",
  metadata = {
    name = prefix .. suffix,
    namespace = obj.metadata.namespace,
    ownerReferences = {
      {apiVersion = obj.apiVersion, kind = obj.kind, name = obj.metadata.name, uid = obj.metadata.uid},
    },
  },
  spec = {
    policyRef = {name = obj.metadata.name},
    mode = "Plan",
    reason = "planned in Argo CD",
    deadline = "30m",
    ttlAfterFinished = "1h",
  },
}
return {{operation = "create", resource = plan}}
