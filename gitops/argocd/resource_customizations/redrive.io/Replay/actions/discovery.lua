-- No action approves a Replay. `resume` ends a suspension; a Replay that needs an approval still waits for it.
local has_ended = false
for _, condition in ipairs(obj.status and obj.status.conditions or {}) do
  if (condition.type == "Complete" or condition.type == "Failed") and condition.status == "True" then
    has_ended = true
  end
end
local is_fixed = has_ended or obj.spec.cancel == true

return {
  suspend = {iconClass = "fa fa-fw fa-pause", disabled = is_fixed or obj.spec.suspend == true},
  resume = {iconClass = "fa fa-fw fa-play", disabled = is_fixed or obj.spec.suspend ~= true},
  cancel = {iconClass = "fa fa-fw fa-stop", disabled = is_fixed},
}
