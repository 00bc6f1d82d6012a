-- An Inspection is Healthy once its summary is complete. An end stays, whatever changes later.
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
  return {status = "Healthy", message = conditions.Complete.message}
end
if conditions.Ready == nil or status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waiting for the operator"}
end
if holds("Stalled") then
  return {status = "Degraded", message = conditions.Stalled.message}
end
return {status = "Progressing", message = conditions.Ready.message}
