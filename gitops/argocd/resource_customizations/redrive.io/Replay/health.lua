-- A Replay that was suspended, or waits for a confirmation or an approval, is Suspended. An end stays, whatever changes later.
local status = obj.status or {}
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

if holds("Failed") then
  return {status = "Degraded", message = conditions.Failed.message}
end
if holds("Complete") then
  local message = conditions.Complete.message
  if holds("MessagesRefused") then
    message = message .. "; " .. conditions.MessagesRefused.message
  end
  return {status = "Healthy", message = message}
end
if conditions.Ready == nil or status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waiting for the operator"}
end
if holds("Stalled") then
  return {status = "Degraded", message = conditions.Stalled.message}
end
if holds("Suspended") or holds("InReview") or holds("ApprovalRequired") then
  return {status = "Suspended", message = conditions.Ready.message}
end

local message = conditions.Ready.message
if status.run ~= nil and status.run.progress ~= nil then
  message = message .. "; " .. status.run.progress .. " messages"
end
return {status = "Progressing", message = message}
