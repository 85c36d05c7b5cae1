local item = load(ask.id)
if not item or item.state ~= 'leased' or item.token ~= ask.token then
  return 0
end
if ask.delta then
  add_tokens(item.id, ARGV[2])
else
  add_event(item, ARGV[2], false)
end
return 1
