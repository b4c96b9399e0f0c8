@0xd2f1c9a0b7e63a51;

# Sends back what comes, and keeps a counter for each connection that asks for one.
interface Echo {
  say @0 (text :Text) -> (text :Text);
  counter @1 () -> (counter :Counter);
}

# A capability: only the connection that has got it can call it.
interface Counter {
  next @0 () -> (value :UInt64);
}
