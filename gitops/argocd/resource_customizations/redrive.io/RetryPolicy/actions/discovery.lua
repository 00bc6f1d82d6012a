-- No action approves a Replay, or moves messages that no person confirms.
local annotations = obj.metadata.annotations or {}
local is_paused = annotations["redrive.io/paused"] == "true"
local discards = obj.spec.deadLetter ~= nil and obj.spec.deadLetter.mode == "Discard"

return {
  ["plan-replay"] = {displayName = "Plan a replay", iconClass = "fa fa-fw fa-list-ol", disabled = discards},
  ["review-replay"] = {displayName = "Review a replay", iconClass = "fa fa-fw fa-tasks", disabled = discards},
  reconcile = {iconClass = "fa fa-fw fa-sync", disabled = is_paused},
  pause = {iconClass = "fa fa-fw fa-pause", disabled = is_paused},
  resume = {iconClass = "fa fa-fw fa-play", disabled = not is_paused},
}
