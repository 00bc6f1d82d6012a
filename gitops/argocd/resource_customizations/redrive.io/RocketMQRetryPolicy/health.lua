-- Stalled is Degraded: a user has to act. A warning is Healthy with a message, and a paused policy is Suspended.
local status = obj.status or {}
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end

local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

if holds("Paused") then
  return {status = "Suspended", message = conditions.Paused.message}
end
if conditions.Ready == nil or status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waiting for the operator"}
end
if holds("Stalled") then
  return {status = "Degraded", message = conditions.Stalled.message}
end
if not holds("Ready") then
  return {status = "Progressing", message = conditions.Ready.message}
end

local messages = {conditions.Ready.message}
for _, kind in ipairs(status.warnings or {}) do
  if holds(kind) then
    table.insert(messages, kind .. ": " .. conditions[kind].message)
  end
end
return {status = "Healthy", message = table.concat(messages, "; ")}
