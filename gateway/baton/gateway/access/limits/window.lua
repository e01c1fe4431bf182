-- One tenant's limits, by Redis's own clock. Precedes every script; window.py does the same in one process.
-- KEYS: 1 the last minute, 2 running requests by gateway, 3 tokens by month.
-- CELL_MS and CELLS are defined before this text.
local RING = CELLS + 1
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now = math.floor(now_ms / CELL_MS)
local KINDS = {'r', 'i', 'o'}

local state = redis.call('HMGET', KEYS[1], 'cell', 'newest', 'mark', 'r', 'i', 'o')
local last, newest, mark = tonumber(state[1]), tonumber(state[2]) or 0, tonumber(state[3]) or 0
local totals = {tonumber(state[4]) or 0, tonumber(state[5]) or 0, tonumber(state[6]) or 0}

local function slot(kind, cell)
  return KINDS[kind] .. cell % RING
end

local function reset_window()
  redis.call('DEL', KEYS[1])
  totals, newest, mark = {0, 0, 0}, 0, now_ms
end

local function drop_cells(first, final)
  local fields, kinds = {}, {}
  for cell = first, final do
    for kind = 1, 3 do
      fields[#fields + 1] = slot(kind, cell)
      kinds[#kinds + 1] = kind
    end
  end
  local values = redis.call('HMGET', KEYS[1], unpack(fields))
  local gone = {}
  for index, value in ipairs(values) do
    if value then
      totals[kinds[index]] = math.max(0, totals[kinds[index]] - tonumber(value))
      gone[#gone + 1] = fields[index]
    end
  end
  if #gone > 0 then
    redis.call('HDEL', KEYS[1], unpack(gone))
  end
end

local function add(kind, amount)
  if amount > 0 then
    totals[kind] = totals[kind] + amount
    redis.call('HINCRBY', KEYS[1], slot(kind, now), amount)
    newest = now
  end
end

if not last or now - last >= RING then
  reset_window()
elseif last - now > 10000 / CELL_MS then
  -- The clock went back, as after a failover: the usage counts from now on.
  local kept, old_mark = totals, mark
  reset_window()
  mark = old_mark
  for kind = 1, 3 do
    add(kind, kept[kind])
  end
elseif now < last then
  now = last
elseif now > last then
  drop_cells(last + 1, now)
end

local function save_window()
  redis.call('HSET', KEYS[1], 'cell', now, 'newest', newest, 'mark', mark, 'r', totals[1], 'i', totals[2], 'o', totals[3])
  redis.call('PEXPIRE', KEYS[1], 2 * CELLS * CELL_MS)
end

-- Returns the milliseconds until `needed` of a kind expire.
local function wait_ms(kind, needed)
  local fields = {}
  for cell = now - CELLS, now do
    fields[#fields + 1] = slot(kind, cell)
  end
  local freed = 0
  for index, value in ipairs(redis.call('HMGET', KEYS[1], unpack(fields))) do
    freed = freed + (tonumber(value) or 0)
    if freed >= needed then
      return math.max(1, (now + index) * CELL_MS - now_ms)
    end
  end
  return CELLS * CELL_MS
end

-- Returns requests and tokens of other gateways. A gateway whose lease has expired has none.
local function others(me, lease_ms)
  local requests, tokens = 0, 0
  local leases = redis.call('HGETALL', KEYS[2])
  for index = 1, #leases, 2 do
    if leases[index] ~= me then
      local count, reserved, expiry = leases[index + 1]:match('^(%d+) (%d+) (%d+)$')
      expiry = tonumber(expiry) or 0
      if expiry <= now_ms then
        redis.call('HDEL', KEYS[2], leases[index])
      else
        requests, tokens = requests + tonumber(count), tokens + tonumber(reserved)
        if expiry > now_ms + lease_ms then
          redis.call('HSET', KEYS[2], leases[index], count .. ' ' .. reserved .. ' ' .. now_ms + lease_ms)
        end
      end
    end
  end
  return requests, tokens
end

local function save_lease(me, requests, tokens, lease_ms)
  if requests > 0 then
    redis.call('HSET', KEYS[2], me, string.format('%d %d %d', requests, tokens, now_ms + lease_ms))
    redis.call('PEXPIRE', KEYS[2], 2 * lease_ms)
  else
    redis.call('HDEL', KEYS[2], me)
  end
end

local function month_of(seconds)
  local day = math.floor(seconds / 86400) + 719468
  local era = math.floor(day / 146097)
  day = day - era * 146097
  local year = math.floor((day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  day = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * day + 2) / 153)
  month = month < 10 and month + 3 or month - 9
  return (year + era * 400 + (month <= 2 and 1 or 0)) * 100 + month
end

-- Returns the month and its tokens, never fewer than the calling gateway already knows.
local function spend(amount, known_month, known)
  local month = month_of(tonumber(time[1]))
  local spent = tonumber(redis.call('HGET', KEYS[3], month)) or 0
  local total = spent
  if month == known_month and known > total then
    total = known
  end
  total = total + amount
  if total ~= spent then
    redis.call('HSET', KEYS[3], month, total)
    redis.call('EXPIRE', KEYS[3], 5356800)
  end
  return month, total
end
