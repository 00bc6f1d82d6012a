-- Creates a Replay in review: it counts all dead letters, and moves them only once a person confirms it within 15 minutes, as
-- `kubectl redrive follow` does at a terminal. No action confirms it.
local os = require("os")

-- The time to the minute: two clicks in a minute make one review. A name has at most 63 characters.
local suffix = "-review-" .. os.date("!%Y%m%d%H%M")
local prefix = obj.metadata.name
if #prefix + #suffix > 63 then
  prefix = obj.metadata.uid
end

local review = {
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
    mode = "Review",
    reason = "reviewed in Argo CD",
    ttlAfterFinished = "7d",
  },
}
return {{operation = "create", resource = review}}
