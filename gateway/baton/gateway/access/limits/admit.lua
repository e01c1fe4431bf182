-- Reserves one request of all limits, or of none. A dry run reserves nothing.
local me, lease_ms = ARGV[1], tonumber(ARGV[4])
local running, reserved = tonumber(ARGV[2]), tonumber(ARGV[3]) -- of this gateway, with this request
local asked = {tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])}
local limits = {tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])}
local most_running, budget = tonumber(ARGV[11]), tonumber(ARGV[12])
local tokens = asked[2] + asked[3]
local dry_run = ARGV[19] == '1'

-- Adds what this gateway admitted while Redis was unreachable, or what Redis lost.
for kind = 1, 3 do
  add(kind, tonumber(ARGV[12 + kind]))
end
local month, spent = 0, 0
if budget > 0 then
  month, spent = spend(tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[18]))
end

local refused, used, retry = 0, 0, -1
for kind = 1, 3 do
  if refused == 0 and limits[kind] > 0 and totals[kind] + asked[kind] > limits[kind] then
    refused, used = kind, totals[kind]
    if asked[kind] <= limits[kind] then
      retry = wait_ms(kind, totals[kind] + asked[kind] - limits[kind])
    end
  end
end
if most_running > 0 or budget > 0 then
  local requests_elsewhere, tokens_elsewhere = others(me, lease_ms)
  if refused == 0 and most_running > 0 and requests_elsewhere + running > most_running then
    refused, used, retry = 4, requests_elsewhere + running - asked[1], 1000
  end
  local taken = spent + tokens_elsewhere + reserved
  if refused == 0 and budget > 0 and taken > budget then
    refused, used = 5, taken - tokens
  end
  if refused == 0 and not dry_run then
    save_lease(me, running, reserved, lease_ms)
  else
    save_lease(me, running - asked[1], reserved - tokens, lease_ms)
  end
end
if refused == 0 and not dry_run then
  for kind = 1, 3 do
    add(kind, asked[kind])
  end
end
save_window()
local reset = newest > 0 and math.max(0, (newest + RING) * CELL_MS - now_ms) or 0
return {refused, used, retry, totals[1], totals[2], totals[3], reset, now, mark, month, spent}
