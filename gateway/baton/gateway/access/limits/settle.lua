-- Corrects a reservation to the actual usage, and records how many requests this gateway runs.
local me, lease_ms = ARGV[1], tonumber(ARGV[4])
local cell = tonumber(ARGV[5]) -- of the reservation; -1: none
local changes = {0, tonumber(ARGV[7]), tonumber(ARGV[8])}
local spends, has_leases = ARGV[9] == '1', ARGV[10] == '1'

if cell >= 0 then
  local is_same = mark == tonumber(ARGV[6])
  for kind = 2, 3 do
    local change = changes[kind]
    if change > 0 then
      add(kind, change)
    elseif change < 0 and is_same and cell <= now and now - cell <= CELLS then
      local field = slot(kind, cell)
      local given_back = math.min(-change, tonumber(redis.call('HGET', KEYS[1], field)) or 0)
      redis.call('HINCRBY', KEYS[1], field, -given_back)
      totals[kind] = math.max(0, totals[kind] - given_back)
    end
  end
  save_window()
end
local month, spent = 0, 0
if spends then
  month, spent = spend(tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13]))
end
if has_leases then
  save_lease(me, tonumber(ARGV[2]), tonumber(ARGV[3]), lease_ms)
end
return {month, spent}
