local health = {}
local status = obj.status or {}

if (status.observedGeneration or 0) < (obj.metadata.generation or 0) then
  health.status = "Progressing"
  health.message = "waiting for the operator"
  return health
end

local phases = {
  Running = "Healthy",
  Succeeded = "Healthy",
  Failed = "Degraded",
  Suspended = "Suspended",
}
health.status = phases[status.phase] or "Progressing"
health.message = status.phase or ""
for _, condition in ipairs(status.conditions or {}) do
  if condition.type == "Ready" and condition.message ~= nil and condition.message ~= "" then
    health.message = condition.message
  elseif condition.type == "Stalled" and condition.status == "True" and health.status == "Progressing" then
    health.status = "Degraded"
    health.message = condition.message or condition.reason
    return health
  end
end
return health
