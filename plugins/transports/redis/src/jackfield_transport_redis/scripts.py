"""Lua scripts that run atomically on the server.

Keys of a queue, after its prefix ``jackfield:NAME:``

=============== =======================================================================================================
``format``      the version of this layout
``rows``        the ids of all rows (set)
``row:ID``      a row (hash): ``h:COLUMN`` a cell's digest and header, ``v:COLUMN`` its bytes, ``tags`` JSON
``bytes``       of all values
``saving``      while a checkpoint is being written: whose; it expires
``pending``     rows that the checkpoint has not read yet (set)
``kept``        rows that changed before it came to them (set), with what they were in ``kept:ID``
``staged``      rows that are being restored (set), with ``staged:ID``
=============== =======================================================================================================

A checkpoint copies the set of ids, not the rows. A change of a row that is still pending first saves its old value.
"""

from __future__ import annotations

_KEEP = """
local P = ARGV[1]
local saving = redis.call('EXISTS', P .. 'saving') == 1
local function keep(id)
  if saving and redis.call('SREM', P .. 'pending', id) == 1 then
    redis.call('COPY', P .. 'row:' .. id, P .. 'kept:' .. id)
    redis.call('SADD', P .. 'kept', id)
  end
end
"""

#: Before rows are set in the same transaction: prefix, number of columns, their names; then for each row its id and the
#: bytes of each column.
ANNOUNCE = (
    _KEEP
    + """
local columns, delta, at = tonumber(ARGV[2]), 0, tonumber(ARGV[2]) + 3
while at <= #ARGV do
  local id = ARGV[at]
  keep(id)
  for c = 1, columns do
    delta = delta + tonumber(ARGV[at + c]) - redis.call('HSTRLEN', P .. 'row:' .. id, 'v:' .. ARGV[c + 2])
  end
  redis.call('SADD', P .. 'rows', id)
  at = at + columns + 1
end
redis.call('INCRBY', P .. 'bytes', delta)
"""
)

#: Prefix, ids. Rows and bytes that were freed.
DELETE = (
    _KEEP
    + """
local rows, bytes = 0, 0
for at = 2, #ARGV do
  local id = ARGV[at]
  if redis.call('SISMEMBER', P .. 'rows', id) == 1 then
    keep(id)
    for _, field in ipairs(redis.call('HKEYS', P .. 'row:' .. id)) do
      if string.sub(field, 1, 2) == 'v:' then
        bytes = bytes + redis.call('HSTRLEN', P .. 'row:' .. id, field)
      end
    end
    redis.call('UNLINK', P .. 'row:' .. id)
    redis.call('SREM', P .. 'rows', id)
    rows = rows + 1
  end
end
redis.call('DECRBY', P .. 'bytes', bytes)
return {rows, bytes}
"""
)

#: Prefix, who, seconds. 0 where another process is saving.
BEGIN = """
local P = ARGV[1]
local whose = redis.call('GET', P .. 'saving')
if whose and whose ~= ARGV[2] then return 0 end
redis.call('SET', P .. 'saving', ARGV[2], 'EX', ARGV[3])
for _, id in ipairs(redis.call('SMEMBERS', P .. 'kept')) do redis.call('UNLINK', P .. 'kept:' .. id) end
redis.call('UNLINK', P .. 'kept', P .. 'pending')
redis.call('COPY', P .. 'rows', P .. 'pending')
return 1
"""

#: Prefix, who, seconds, most rows, about how many bytes. Some rows of the checkpoint: id, fields and values; none: that
#: was all; -1: it is not ours any more.
TAKE = """
local P = ARGV[1]
if redis.call('GET', P .. 'saving') ~= ARGV[2] then return -1 end
redis.call('EXPIRE', P .. 'saving', ARGV[3])
local found, bytes = {}, 0
for _, from in ipairs({{'pending', 'row:'}, {'kept', 'kept:'}}) do
  while #found < tonumber(ARGV[4]) and bytes < tonumber(ARGV[5]) do
    local id = redis.call('SPOP', P .. from[1])
    if not id then break end
    local fields = redis.call('HGETALL', P .. from[2] .. id)
    for _, text in ipairs(fields) do bytes = bytes + #text end
    found[#found + 1] = {id, fields}
    if from[1] == 'kept' then redis.call('UNLINK', P .. 'kept:' .. id) end
  end
end
return found
"""

#: Prefix, who.
END = """
local P = ARGV[1]
if redis.call('GET', P .. 'saving') == ARGV[2] then redis.call('UNLINK', P .. 'saving', P .. 'pending') end
"""

#: Prefix. Forget what a restore that was broken off left.
STAGE = """
local P = ARGV[1]
for _, id in ipairs(redis.call('SMEMBERS', P .. 'staged')) do redis.call('UNLINK', P .. 'staged:' .. id) end
redis.call('UNLINK', P .. 'staged')
"""

#: Prefix, bytes. What was staged takes the place of all rows; a checkpoint that is being written is none.
SWAP = """
local P = ARGV[1]
for _, id in ipairs(redis.call('SMEMBERS', P .. 'rows')) do redis.call('UNLINK', P .. 'row:' .. id) end
redis.call('UNLINK', P .. 'rows', P .. 'saving', P .. 'pending')
for _, id in ipairs(redis.call('SMEMBERS', P .. 'staged')) do
  local from, to = P .. 'staged:' .. id, P .. 'row:' .. id
  if redis.call('EXISTS', from) == 1 then redis.call('RENAME', from, to) end
end
if redis.call('EXISTS', P .. 'staged') == 1 then redis.call('RENAME', P .. 'staged', P .. 'rows') end
redis.call('SET', P .. 'bytes', ARGV[2])
"""
