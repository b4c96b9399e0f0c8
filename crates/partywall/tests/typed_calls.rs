//! Typed methods: values of every kind, and peers whose bytes are no such values.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::gate::gate;
use common::process::{self, child};
use common::world::World;
use common::*;
use partywall::rpc::{
    Argument, CallClient, CallError, CallServer, Carried, HeapSlice, IncomingCall, Method, PeerSlice, PlainData,
    ValueWriter,
};
use partywall::{Domain, MessageListener, MessageSocket, Options, RingSize};
use std::time::Duration;
use zerocopy::{Immutable, IntoBytes, TryFromBytes};

#[derive(Debug, Clone, Copy, PartialEq, TryFromBytes, IntoBytes, Immutable)]
#[repr(u8)]
enum Colour {
    Red = 1,
    Green = 2,
}

#[derive(Debug, Clone, Copy, PartialEq, TryFromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Pixel {
    at: [u16; 2],
    letter: char,
    colour: Colour,
    is_lit: bool,
    more: [u8; 2],
}

/// A value that is larger than a record carries, and than is judged on the stack.
type Large = [u64; 100];

impl PlainData for Colour {}
impl PlainData for Pixel {}

partywall::service! {
    trait Canvas, client CanvasClient {
        fn nothing();
        fn sum(numbers: &[u64]) -> u64;
        fn sum_in_place(numbers: &HeapSlice<u64>) -> u64;
        fn turn(pixel: Pixel, colour: Colour) -> Pixel;
        fn count(pixels: &[Pixel], colour: Option<Colour>) -> (u32, Option<Pixel>);
        fn greet(name: &str, times: u32) -> String;
        fn squares(count: u32) -> HeapSlice<u64>;
        fn reversed(bytes: Vec<u8>) -> Vec<u8>;
        fn large(value: Large) -> Large;
        fn pick(letters: &[char], index: u64) -> char;
        fn fail(code: u32) -> bool;
        fn panic();
        fn wait();
        fn end();
    }
}

#[derive(Default)]
struct Painter {
    /// What `wait` waits for, if it is to wait.
    gate: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Canvas for Painter {
    fn nothing(&self, _: &IncomingCall<'_>) -> Result<(), CallError> {
        Ok(())
    }
    fn sum(&self, _: &IncomingCall<'_>, numbers: PeerSlice<u64>) -> Result<u64, CallError> {
        numbers.iter().sum()
    }
    fn sum_in_place(&self, _: &IncomingCall<'_>, numbers: PeerSlice<u64>) -> Result<u64, CallError> {
        assert!(numbers.view().offset().is_some(), "they are in the heap, not in the record");
        numbers.iter().sum()
    }
    fn turn(&self, _: &IncomingCall<'_>, pixel: Pixel, colour: Colour) -> Result<Pixel, CallError> {
        Ok(Pixel { colour, is_lit: !pixel.is_lit, ..pixel })
    }
    fn count(
        &self,
        _: &IncomingCall<'_>,
        pixels: PeerSlice<Pixel>,
        colour: Option<Colour>,
    ) -> Result<(u32, Option<Pixel>), CallError> {
        let (mut count, mut last) = (0, None);
        for pixel in &pixels {
            let pixel = pixel?;
            if colour.is_none_or(|colour| pixel.colour == colour) {
                (count, last) = (count + 1, Some(pixel));
            }
        }
        Ok((count, last))
    }
    fn greet(&self, _: &IncomingCall<'_>, name: String, times: u32) -> Result<String, CallError> {
        Ok(format!("Hello {name}! ").repeat(times as usize))
    }
    fn squares(&self, call: &IncomingCall<'_>, count: u32) -> Result<HeapSlice<u64>, CallError> {
        let mut squares = HeapSlice::filled(call.heap(), count as usize, 0u64)?;
        for (n, square) in (0u64..).zip(squares.iter_mut()) {
            *square = n * n;
        }
        Ok(squares)
    }
    fn reversed(&self, _: &IncomingCall<'_>, mut bytes: Vec<u8>) -> Result<Vec<u8>, CallError> {
        bytes.reverse();
        Ok(bytes)
    }
    fn large(&self, _: &IncomingCall<'_>, value: Large) -> Result<Large, CallError> {
        Ok(value)
    }
    fn pick(&self, _: &IncomingCall<'_>, letters: PeerSlice<char>, index: u64) -> Result<char, CallError> {
        letters.get(index as usize)
    }
    fn fail(&self, _: &IncomingCall<'_>, code: u32) -> Result<bool, CallError> {
        Err(CallError::application(code, "as was asked"))
    }
    fn panic(&self, _: &IncomingCall<'_>) -> Result<(), CallError> {
        panic!("a method of the test")
    }
    fn wait(&self, _: &IncomingCall<'_>) -> Result<(), CallError> {
        self.gate.iter().for_each(|gate| gate());
        Ok(())
    }
    fn end(&self, _: &IncomingCall<'_>) -> Result<(), CallError> {
        std::process::abort()
    }
}

#[test]
fn child_main() {
    let Some((role, broker)) = process::role() else { return };
    assert_eq!(role, "server");
    let web = Domain::builder().name("web").broker(&broker).join().unwrap();
    let _server = Painter::default().add_to(CallServer::builder()).bind(&web, "canvas").unwrap();
    std::thread::park();
}

fn painted() -> (World, CallServer, CanvasClient) {
    painted_by(Painter::default())
}

fn painted_by(painter: Painter) -> (World, CallServer, CanvasClient) {
    let world = World::new();
    let server = painter.add_to(CallServer::builder()).bind(&world.web, "canvas").unwrap();
    let client = CanvasClient::new(CallClient::builder().connect(&world.shop, "web:canvas").unwrap());
    (world, server, client)
}

const PIXEL: Pixel = Pixel { at: [3, 4], letter: 'é', colour: Colour::Red, is_lit: true, more: [0; 2] };

#[test]
fn values_of_every_kind_arrive_as_they_were() {
    let _guard = hang_guard();
    let (_world, _server, client) = painted();
    client.nothing().unwrap();
    for len in [0, 1, 3, 4, 5, 1000, 100_000u64] {
        let numbers: Vec<u64> = (0..len).collect();
        let sum = numbers.iter().sum::<u64>();
        assert_eq!(client.sum(&numbers).unwrap(), sum, "{len} numbers, copied");
        let in_heap = HeapSlice::copied(client.calls().heap(), &numbers).unwrap();
        assert_eq!(client.sum_in_place(&in_heap).unwrap(), sum, "{len} numbers, in place");
        assert_eq!(
            client.squares(len as u32).unwrap().to_vec().unwrap(),
            numbers.iter().map(|n| n * n).collect::<Vec<_>>()
        );
    }
    let green = Pixel { colour: Colour::Green, is_lit: false, ..PIXEL };
    assert_eq!(client.turn(PIXEL, Colour::Green).unwrap(), green);
    assert_eq!(client.count(&[PIXEL, green, PIXEL], Some(Colour::Green)).unwrap(), (1, Some(green)));
    assert_eq!(client.count(&[PIXEL; 500], None).unwrap(), (500, Some(PIXEL)));
    assert_eq!(client.count(&[PIXEL], Some(Colour::Green)).unwrap(), (0, None));
    assert_eq!(client.greet("Zoë", 1).unwrap(), "Hello Zoë! ");
    assert_eq!(client.greet("Zoë", 500).unwrap().len(), 500 * 12);
    let bytes = Pattern.bytes(1, 10_000);
    assert_eq!(client.reversed(bytes.clone()).unwrap(), bytes.into_iter().rev().collect::<Vec<_>>());
    let large = std::array::from_fn(|n| n as u64);
    assert_eq!(client.large(large).unwrap(), large);
    assert_eq!(client.pick(&['a', 'ß'], 1).unwrap(), 'ß');
    assert_eq!(client.calls().heap().stats().blocks, 0, "no copy is left");
}

#[test]
fn values_behind_the_last_inline_byte_follow_the_earlier_ones() {
    let expected: Vec<u8> = (0..60).collect();
    for first in 0..60 {
        let (head, tail) = expected.split_at(first);
        let mut frame = ValueWriter::default();
        head.iter().for_each(|byte| byte.put(&mut frame));
        assert_eq!(frame.bytes(), head);
        // The rest as one value.
        let mut last = ValueWriter::default();
        tail.to_vec().put(&mut last);
        tail.to_vec().put(&mut frame);
        assert_eq!(frame.bytes(), [head, last.bytes()].concat(), "{first}");
    }
    assert_eq!(frame(&[&[7u8; 40], &9u8]), [[7; 40].as_slice(), &[9]].concat());
}

#[test]
fn heap_slice_of_the_server_stays_until_it_is_dropped() {
    let _guard = hang_guard();
    let (_world, _server, client) = painted();
    let held: Vec<PeerSlice<u64>> = (1..20).map(|count| client.squares(count).unwrap()).collect();
    for (count, squares) in (1u64..).zip(&held) {
        assert_eq!(squares.to_vec().unwrap(), (0..count).map(|n| n * n).collect::<Vec<_>>());
        assert_eq!(squares.get(count as usize - 1).unwrap(), (count - 1) * (count - 1));
    }
}

#[test]
fn errors_reach_the_client_as_they_are() {
    let _guard = hang_guard();
    let (wait, _, go) = gate();
    let (world, _server, client) = painted_by(Painter { gate: Some(Box::new(wait)) });
    assert!(matches!(client.fail(7), Err(CallError::Application { code: 7, message }) if message == "as was asked"));
    assert!(matches!(client.panic(), Err(CallError::Panicked)));
    assert!(matches!(client.pick(&['a'], 1), Err(CallError::BadPointer)), "an index behind the last element");
    assert!(matches!(client.pick(&['a'], u64::MAX), Err(CallError::BadPointer)));
    let hasty = client.within(Duration::from_millis(1));
    assert!(matches!(hasty.wait(), Err(CallError::TimedOut)));
    drop(go);
    let other = CallServer::builder().bind(&world.web, "other").unwrap();
    let stranger = CanvasClient::new(CallClient::builder().connect(&world.shop, "web:other").unwrap());
    assert!(matches!(stranger.nothing(), Err(CallError::UnknownMethod)));
    drop(other);
    assert!(matches!(stranger.nothing(), Err(CallError::Closed { .. })));
    client.nothing().unwrap();
}

#[test]
fn server_killed_in_a_typed_call_is_dead_to_its_client() {
    let _guard = hang_guard();
    let world = World::new();
    let _server = child("server", world.broker.path());
    let mut client = None;
    eventually("the server of another process is there", || {
        client = CallClient::builder().connect(&world.shop, "web:canvas").ok();
        client.is_some()
    });
    let client = CanvasClient::new(client.unwrap());
    let squares = client.squares(1000).unwrap();
    assert!(matches!(client.end(), Err(CallError::Dead { seen: true })));
    assert_eq!(squares.get(30).unwrap(), 900, "what it had lent can still be read");
    assert!(matches!(client.nothing(), Err(CallError::Dead { seen: false })));
}

/// Arguments as a client puts them together whose types are not the server's.
fn frame(arguments: &[&dyn Argument]) -> Vec<u8> {
    let mut frame = ValueWriter::default();
    for argument in arguments {
        argument.pass(&mut frame);
    }
    frame.bytes().to_vec()
}

#[test]
fn bytes_that_are_no_value_are_refused_by_the_server() {
    let _guard = hang_guard();
    let (_world, _server, client) = painted();
    let mut pixel = frame(&[&PIXEL, &Colour::Red]);
    let mut cases = vec![
        ("nothing", vec![0], "more than there is"),
        ("turn", vec![], "nothing"),
        ("turn", pixel[..12].to_vec(), "too short"),
        ("turn", [&pixel[..], &[0]].concat(), "too long"),
        ("count", frame(&[&0u64, &3u8]), "an option that is neither there nor not"),
        ("count", frame(&[&0u64, &1u8, &0u8]), "an option of no colour"),
        ("sum", frame(&[&(7u64 << 1)]), "7 bytes, and none there"),
        ("sum", frame(&[&(7u64 << 1), &[0u8; 7]]), "7 bytes of numbers of 8"),
        ("sum", frame(&[&(u64::MAX - 1)]), "more than there is memory"),
        ("sum", frame(&[&(u64::MAX - 15), &[0u8; 16]]), "a length that would wrap"),
        ("greet", frame(&[&(2u64 << 1), &[0xc3u8, 0x28], &1u32]), "no UTF-8"),
        ("pick", frame(&[&(4u64 << 1), &0xd800u32, &0u64]), "half of a surrogate pair"),
        ("pick", frame(&[&(4u64 << 1), &0x11_0000u32, &0u64]), "behind the last character"),
    ];
    for (at, byte, what) in
        [(8, 0, "colour 0"), (8, 3, "colour 3"), (9, 2, "a `bool` of 2"), (12, 9, "another colour 9")]
    {
        let before = std::mem::replace(&mut pixel[at], byte);
        cases.push(("turn", pixel.clone(), what));
        pixel[at] = before;
    }
    for (method, arguments, what) in cases {
        let result = client.calls().call(Method::named(&format!("Canvas.{method}")), &arguments);
        assert!(matches!(&result, Err(CallError::Refused(text)) if text.contains("no value")), "{what}: {result:?}");
    }
    for (address, len) in [(0u64, 8u64), (0x3000_0000_0000, 8), (u64::MAX, 8), (u64::MAX - 7, u64::MAX >> 1)] {
        let arguments = frame(&[&(len << 1 | 1), &address]);
        let result = client.calls().call("Canvas.sum", &arguments);
        assert!(matches!(result, Err(CallError::BadPointer)), "{address:#x}, {len}: {result:?}");
    }
    client.nothing().unwrap();
}

#[test]
fn invalid_element_has_a_distinct_error() {
    let _guard = hang_guard();
    let (_world, _server, client) = painted();
    let heap = client.calls().heap();
    let mut pixels = heap.allocate(500 * 12).unwrap();
    for place in pixels.chunks_exact_mut(12) {
        place.copy_from_slice(PIXEL.as_bytes());
    }
    let call = |pixels: &partywall::rpc::Block| {
        let arguments = frame(&[&((pixels.len() as u64) << 1 | 1), &pixels.address(), &false]);
        client.calls().call("Canvas.count", &arguments)
    };
    assert_eq!(call(&pixels).unwrap().array(0).unwrap(), 500u32.to_le_bytes());
    pixels[499 * 12 + 8] = 7;
    let result = call(&pixels);
    assert!(matches!(&result, Err(CallError::Refused(text)) if text.contains("Pixel")), "{result:?}");
}

#[test]
fn elements_that_change_under_the_server_are_judged_by_the_copy() {
    let _guard = hang_guard();
    let (_world, _server, client) = painted();
    let mut letters = client.calls().heap().allocate(8192).unwrap();
    letters.fill(0);
    let arguments = frame(&[&(8192u64 << 1 | 1), &letters.address(), &1000u64]);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, place) = (&stop, &mut letters[4000..4004]);
        scope.spawn(move || {
            let mut n = 0u32;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                n = n.wrapping_add(0x2f31);
                place.copy_from_slice(&(n % 0x22_0000).to_le_bytes());
            }
        });
        let (mut valid, mut refused) = (0, 0);
        while valid == 0 || refused == 0 {
            match client.calls().call("Canvas.pick", &arguments) {
                Ok(reply) => {
                    let letter = u32::from_le_bytes(reply.array(0).unwrap());
                    assert!(char::from_u32(letter).is_some(), "{letter:#x} has passed as a letter");
                    valid += 1;
                }
                Err(CallError::Refused(_)) => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// A server that answers the first call with these bytes.
fn lying_server(world: &World, answer: Vec<u8>) -> std::thread::JoinHandle<MessageSocket> {
    let options = Options::default().ring(RingSize::Fixed(1 << 16));
    let mut listener = MessageListener::bind(&world.web, "lies", &options).unwrap();
    std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        let record = |kind: u64, method: u32, bytes: &[u8]| {
            let mut record = vec![0; 56];
            record[4..8].copy_from_slice(&method.to_le_bytes());
            record[8..16].copy_from_slice(&(kind | (bytes.len() as u64) << 32).to_le_bytes());
            record[16..16 + bytes.len()].copy_from_slice(bytes);
            record
        };
        socket.send(&record(1, 1, &[])).unwrap();
        socket.send(&record(4, 0, &answer)).unwrap();
        socket
    })
}

#[test]
fn answer_that_is_no_value_is_an_error_of_the_call() {
    let _guard = hang_guard();
    type Call = fn(&CanvasClient) -> Result<String, CallError>;
    let cases: Vec<(&str, Vec<u8>, Call)> = vec![
        ("a `bool` of 2", vec![2], |c| c.fail(1).map(|v| format!("{v:?}"))),
        ("a number that is too short", vec![0; 7], |c| c.sum(&[]).map(|v| format!("{v:?}"))),
        ("a number that is too long", vec![0; 9], |c| c.sum(&[]).map(|v| format!("{v:?}"))),
        ("something for nothing", vec![0], |c| c.nothing().map(|v| format!("{v:?}"))),
        ("no character", 0xd800u32.to_le_bytes().to_vec(), |c| c.pick(&[], 0).map(|v| format!("{v:?}"))),
        ("no text", frame(&[&(1u64 << 1), &0xffu8]), |c| c.greet("", 0)),
        ("a pointer", frame(&[&(8u64 << 1 | 1), &0x3000_0000_0000u64]), |c| c.greet("", 0)),
        ("elements that are not there", frame(&[&(1000u64 << 1)]), |c| c.reversed(vec![]).map(|v| format!("{v:?}"))),
        ("half an element", vec![0; 12], |c| c.squares(1).map(|v| format!("{v:?}"))),
    ];
    for (what, answer, call) in cases {
        let world = World::new();
        let server = lying_server(&world, answer);
        let client = CanvasClient::new(CallClient::builder().connect(&world.shop, "web:lies").unwrap());
        let result = call(&client);
        let Err(CallError::BadValue(why)) = result else { panic!("{what}: {result:?}") };
        assert_eq!(what == "a pointer", why == "a pointer in a result", "{what}: {why}");
        drop(server.join().unwrap());
    }
}
