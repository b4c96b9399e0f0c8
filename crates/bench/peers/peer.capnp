# The calls of `partywall bench rpc`, for Cap'n Proto.
@0xb7d1f0c2a4e69358;

struct Fixed { left @0 :Int32; right @1 :Int32; weight @2 :Float64; }
struct Variable { text @0 :Text; weight @1 :Float64; }

interface Peer {
  nothing @0 () -> ();
  sendBytes @1 (all :Data) -> (value :Float64);
  sendFixed @2 (all :List(Fixed)) -> (value :Float64);
  sendVariable @3 (all :List(Variable)) -> (value :Float64);
  receiveBytes @4 (count :UInt32) -> (all :Data);
  receiveFixed @5 (count :UInt32) -> (all :List(Fixed));
  receiveVariable @6 (count :UInt32) -> (all :List(Variable));
}
