//! virtio-net headers, and what a receiver without a sender's offloads needs: frames that are split and summed.
//!
//! A guest writes the header of each frame it sends. [`NetHeader::checked`] passes on only what agrees with the frame.

use crate::switch::ETHERNET;
use std::ops::ControlFlow;

/// Bytes of the header that all drivers write; behind them `num_buffers` follows where the driver negotiated it.
pub const SHORT: usize = 10;
/// Bytes of the header with `num_buffers`.
pub const LONG: usize = 12;
/// The longest frame: 65,535 bytes behind an Ethernet header with two VLAN tags.
pub const LONGEST: usize = 65_535 + ETHERNET + 8;
/// Segments that one frame is split into at most.
const SEGMENTS: usize = 2048;
/// Payload that a segment has at least; no network has a smaller one.
const SMALLEST: u16 = 8;
/// A frame of at most this many datagrams may have smaller ones. Linux sends no more of them as one.
const FEW: usize = 128;

const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP: u8 = 5;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The offloads that a receiver accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accepts {
    /// Frames whose sum is still to be made.
    pub csum: bool,
    /// TCP over IPv4 to be split.
    pub tso4: bool,
    /// TCP over IPv6 to be split.
    pub tso6: bool,
    /// UDP over IPv4 to be cut into datagrams.
    pub uso4: bool,
    /// UDP over IPv6 to be cut into datagrams.
    pub uso6: bool,
}

/// A virtio-net header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetHeader {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
    /// The segments are of IPv6. The frame says so, not the header.
    v6: bool,
}

impl NetHeader {
    /// Reads it from the bytes in front of a frame, and checks it against the frame: its first bytes, and its length.
    ///
    /// `None` if it contradicts the frame.
    ///
    /// ```
    /// use partywall_vhost::offload::NetHeader;
    ///
    /// assert!(NetHeader::checked(&[0; 10], &[0; 60], 60).is_some());
    /// // A sum to be made behind the frame's end.
    /// assert!(NetHeader::checked(&[1, 0, 0, 0, 0, 0, 255, 0, 16, 0], &[0; 60], 60).is_none());
    /// ```
    pub fn checked(bytes: &[u8; SHORT], head: &[u8], length: usize) -> Option<Self> {
        let mut header = Self::default();
        header.read(bytes, head, length).then_some(header)
    }

    /// As [`NetHeader::checked`], into this header, which has been [`NetHeader::default`]. Returns whether the header agrees with the frame.
    #[inline]
    pub(crate) fn read(&mut self, bytes: &[u8; SHORT], head: &[u8], length: usize) -> bool {
        if !(ETHERNET..=LONGEST).contains(&length) {
            return false;
        }
        if bytes[0] & NEEDS_CSUM == 0 {
            return bytes[1] == 0;
        }
        match Self::with_sum(bytes, head, length) {
            Some(header) => {
                *self = header;
                true
            }
            None => false,
        }
    }

    /// A header of a frame whose sum is still to be made.
    fn with_sum(bytes: &[u8; SHORT], head: &[u8], length: usize) -> Option<Self> {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let header = Self {
            flags: NEEDS_CSUM,
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
            v6: false,
        };
        let (start, offset) = (usize::from(header.csum_start), usize::from(header.csum_offset));
        // A sum that is made elsewhere would change what has been judged: an address, for example.
        let (at, protocol) = transport(head)?;
        let sum = match protocol {
            TCP => 16,
            UDP => 6,
            _ => return None,
        };
        if at != start || offset != sum || start + offset + 2 > length {
            return None;
        }
        match header.gso_type {
            0 => Some(Self { hdr_len: 0, gso_size: 0, ..header }),
            GSO_TCPV4 | GSO_TCPV6 | GSO_UDP => {
                let layout = SegmentLayout::read(head, start, header.gso_type)?;
                let payload = length.checked_sub(layout.payload)?;
                let size = usize::from(header.gso_size);
                if size == 0 || protocol != layout.protocol() {
                    return None;
                }
                let pieces = payload.div_ceil(size);
                let fits = if !layout.udp {
                    header.gso_size >= SMALLEST && pieces <= SEGMENTS
                } else if size == payload {
                    // One datagram, which needs no cut.
                    return Some(Self { gso_type: 0, hdr_len: 0, gso_size: 0, ..header });
                } else {
                    size < payload && pieces <= if header.gso_size < SMALLEST { FEW } else { SEGMENTS }
                };
                fits.then_some(Self { hdr_len: u16::try_from(layout.payload).ok()?, v6: layout.v6, ..header })
            }
            _ => None,
        }
    }

    /// As written in front of a frame; `buffers` is how many buffers it and the frame fill.
    pub fn bytes(&self, buffers: u16) -> [u8; LONG] {
        let mut out = [0; LONG];
        out[0] = self.flags;
        out[1] = self.gso_type;
        for (at, word) in
            [(2, self.hdr_len), (4, self.gso_size), (6, self.csum_start), (8, self.csum_offset), (10, buffers)]
        {
            out[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Whether a receiver takes a frame with this header as it is.
    pub fn suits(&self, accepts: Accepts) -> bool {
        match self.gso_type {
            0 => self.flags == 0 || accepts.csum,
            GSO_TCPV4 => accepts.csum && accepts.tso4,
            GSO_TCPV6 => accepts.csum && accepts.tso6,
            _ => accepts.csum && if self.v6 { accepts.uso6 } else { accepts.uso4 },
        }
    }

    /// How many frames a receiver without offloads takes in place of one of this length.
    pub fn segments(&self, length: usize) -> usize {
        if self.gso_type == 0 {
            return 1;
        }
        length.saturating_sub(usize::from(self.hdr_len)).div_ceil(usize::from(self.gso_size).max(1)).max(1)
    }

    /// Gives `sink` the frames that a receiver without offloads takes in place of `frame`, whose header this is, until it breaks off.
    pub fn translate(&self, frame: &mut [u8], mut sink: impl FnMut(&[u8]) -> ControlFlow<()>) {
        if self.gso_type != 0 {
            return self.split(frame, sink);
        }
        if self.flags != 0 {
            let (start, offset) = (usize::from(self.csum_start), usize::from(self.csum_offset));
            let Some(body) = frame.get_mut(start..).filter(|body| body.len() >= offset + 2) else { return };
            // The field holds the sum of the pseudo header.
            let sum = finish(add(0, body));
            // UDP's 0 means that there is none.
            let sum = if sum == 0 && offset == 6 { 0xffff } else { sum };
            body[offset..offset + 2].copy_from_slice(&sum.to_be_bytes());
        }
        let _ = sink(frame);
    }

    fn split(&self, frame: &[u8], mut sink: impl FnMut(&[u8]) -> ControlFlow<()>) {
        let start = usize::from(self.csum_start);
        let Some(layout) = SegmentLayout::read(frame, start, self.gso_type) else { return };
        let size = usize::from(self.gso_size).max(1);
        let Some((headers, payload)) = frame.split_at_checked(layout.payload) else { return };
        let pieces = payload.chunks(size).count();
        let mut out = Vec::with_capacity(headers.len() + size);
        for (n, piece) in payload.chunks(size).enumerate().take(SEGMENTS) {
            out.clear();
            out.extend_from_slice(headers);
            out.extend_from_slice(piece);
            let last = n + 1 == pieces;
            layout.finish(&mut out, start, n, n * size, last);
            if sink(&out).is_break() {
                return;
            }
        }
    }
}

/// Where the transport of an IP packet begins, and which it is. `None` in a fragment.
fn transport(head: &[u8]) -> Option<(usize, u8)> {
    let (mut ip, mut kind) = (ETHERNET, head.get(ETHERNET - 2..ETHERNET)?);
    while (kind == [0x81, 0] || kind == [0x88, 0xa8]) && ip < ETHERNET + 8 {
        ip += 4;
        kind = head.get(ip - 2..ip)?;
    }
    let packet = head.get(ip..)?;
    match (kind, packet.first()? >> 4) {
        ([8, 0], 4) => {
            let header = packet.first_chunk::<20>()?;
            let whole = u16::from_be_bytes([header[6], header[7]]) & 0x3fff == 0;
            let length = usize::from(header[0] & 15) * 4;
            (whole && length >= 20).then_some((ip + length, header[9]))
        }
        ([0x86, 0xdd], 6) => {
            let (mut next, mut at) = (packet.first_chunk::<40>()?[6], 40);
            // Hop-by-hop options, routing, destination options: their length is in units of 8 bytes.
            while matches!(next, 0 | 43 | 60) {
                let extension = packet.get(at..)?.first_chunk::<2>()?;
                next = extension[0];
                at += 8 * (usize::from(extension[1]) + 1);
            }
            Some((ip + at, next))
        }
        _ => None,
    }
}

/// Where the headers of a frame of TCP or UDP are.
#[derive(Debug, Clone, Copy)]
struct SegmentLayout {
    ip: usize,
    v6: bool,
    udp: bool,
    payload: usize,
}

impl SegmentLayout {
    /// From a frame's first bytes, with TCP or UDP at `start`. The headers must be whole in `head`.
    fn read(head: &[u8], start: usize, gso_type: u8) -> Option<Self> {
        let mut ip = ETHERNET;
        let mut kind = head.get(ETHERNET - 2..ETHERNET)?;
        while (kind == [0x81, 0] || kind == [0x88, 0xa8]) && ip < ETHERNET + 8 {
            ip += 4;
            kind = head.get(ip - 2..ip)?;
        }
        let udp = gso_type == GSO_UDP;
        // Of UDP, only the frame says which IP it is.
        let v6 = gso_type == GSO_TCPV6 || (udp && kind == [0x86, 0xdd]);
        let expected = if v6 { [0x86, 0xdd] } else { [8, 0] };
        let least = ip + if v6 { 40 } else { 20 };
        if kind != expected || start < least || head.get(ip)? >> 4 != if v6 { 6 } else { 4 } {
            return None;
        }
        let length = if udp { 8 } else { usize::from(head.get(start + 12)? >> 4) * 4 };
        let payload = start + length;
        let layout = Self { ip, v6, udp, payload };
        let is_whole = length >= if udp { 8 } else { 20 } && payload <= head.len();
        (is_whole && (v6 || head.get(ip + 9) == Some(&layout.protocol()))).then_some(layout)
    }

    fn protocol(&self) -> u8 {
        if self.udp { UDP } else { TCP }
    }

    /// Corrects the headers of the segment `n` that begins `at` bytes into the payload.
    fn finish(&self, frame: &mut [u8], start: usize, n: usize, at: usize, last: bool) {
        let length = frame.len();
        let short = |number: usize| u16::try_from(number & 0xffff).unwrap_or(0).to_be_bytes();
        let mut pseudo;
        if self.v6 {
            frame[self.ip + 4..self.ip + 6].copy_from_slice(&short(length - self.ip - 40));
            pseudo = add(0, &frame[self.ip + 8..self.ip + 40]);
        } else {
            frame[self.ip + 2..self.ip + 4].copy_from_slice(&short(length - self.ip));
            let id = usize::from(u16::from_be_bytes([frame[self.ip + 4], frame[self.ip + 5]]));
            frame[self.ip + 4..self.ip + 6].copy_from_slice(&short(id + n));
            frame[self.ip + 10..self.ip + 12].fill(0);
            let sum = finish(add(0, &frame[self.ip..start]));
            frame[self.ip + 10..self.ip + 12].copy_from_slice(&sum.to_be_bytes());
            pseudo = add(0, &frame[self.ip + 12..self.ip + 20]);
        }
        pseudo = add(pseudo, &[0, self.protocol()]);
        pseudo = add(pseudo, &short(length - start));
        let sum_at = start + if self.udp { 6 } else { 16 };
        if self.udp {
            frame[start + 4..start + 6].copy_from_slice(&short(length - start));
        } else {
            let mut sequence = [0; 4];
            sequence.copy_from_slice(&frame[start + 4..start + 8]);
            let moved = u32::from_be_bytes(sequence).wrapping_add(u32::try_from(at).unwrap_or(0));
            frame[start + 4..start + 8].copy_from_slice(&moved.to_be_bytes());
            const FIN_PSH: u8 = 0x09;
            const CWR: u8 = 0x80;
            if !last {
                frame[start + 13] &= !FIN_PSH;
            }
            if n > 0 {
                frame[start + 13] &= !CWR;
            }
        }
        frame[sum_at..sum_at + 2].fill(0);
        let sum = finish(add(pseudo, &frame[start..]));
        // UDP's 0 means that there is none.
        let sum = if sum == 0 && self.udp { 0xffff } else { sum };
        frame[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

fn add(sum: u64, bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(2);
    let whole = words.by_ref().fold(sum, |sum, word| sum + u64::from(u16::from_be_bytes([word[0], word[1]])));
    whole + words.remainder().first().map_or(0, |last| u64::from(*last) << 8)
}

fn finish(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
#[path = "../tests/common/datagram.rs"]
mod datagram;

#[cfg(test)]
mod tests {
    use super::datagram::{cut_header, datagram, udp_at};
    use super::*;
    use crate::random::Random;

    const ALL: Accepts = Accepts { csum: true, tso4: true, tso6: true, uso4: true, uso6: true };

    /// A frame of TCP over IPv4 with `payload` bytes, behind this many VLAN tags.
    fn tcp4(tags: usize, payload: usize) -> (Vec<u8>, usize) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        (0..tags).for_each(|_| frame.extend([0x81, 0, 0, 7]));
        frame.extend([8, 0, 0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let tcp = frame.len();
        frame.extend([1, 2, 3, 4, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0x50, 0x99, 1, 1, 0, 0, 0, 0]);
        frame.extend((0..payload).map(|n| (n % 251) as u8));
        (frame, tcp)
    }

    fn header(gso_type: u8, size: usize, start: usize) -> [u8; SHORT] {
        let (size, start) = (u16::try_from(size).unwrap().to_le_bytes(), u16::try_from(start).unwrap().to_le_bytes());
        [1, gso_type, 0, 0, size[0], size[1], start[0], start[1], 16, 0]
    }

    #[test]
    fn large_frame_becomes_segments_with_right_sums() {
        for tags in 0..3 {
            let (mut frame, tcp) = tcp4(tags, 5000);
            let checked = NetHeader::checked(&header(GSO_TCPV4, 1448, tcp), &frame, frame.len()).unwrap();
            assert!(checked.suits(ALL) && !checked.suits(Accepts { tso4: false, ..ALL }));
            let expected = frame[tcp + 20..].to_vec();
            let (mut lengths, mut payload, mut sequences) = (vec![], vec![], vec![]);
            checked.translate(&mut frame, |segment| {
                let ip = tcp - 20;
                assert_eq!(finish(add(0, &segment[ip..tcp])), 0, "the sum of the IP header");
                let pseudo = add(add(0, &segment[ip + 12..ip + 20]), &[0, 6]) + (segment.len() - tcp) as u64;
                assert_eq!(finish(add(pseudo, &segment[tcp..])), 0, "the sum of TCP");
                assert_eq!(usize::from(u16::from_be_bytes([segment[ip + 2], segment[ip + 3]])), segment.len() - ip);
                lengths.push(segment.len() - tcp - 20);
                sequences.push(u32::from_be_bytes(segment[tcp + 4..tcp + 8].try_into().unwrap()));
                payload.extend_from_slice(&segment[tcp + 20..]);
                let flags = segment[tcp + 13];
                assert_eq!((flags & 9 != 0, flags & 0x80 != 0), (lengths.len() == 4, lengths.len() == 1));
                ControlFlow::Continue(())
            });
            assert_eq!((checked.segments(frame.len()), lengths.len()), (4, 4));
            let mut made = 0;
            checked.translate(&mut frame, |_| {
                made += 1;
                ControlFlow::Break(())
            });
            assert_eq!(made, 1, "no segment is made for a receiver that takes none");
            assert_eq!(lengths, [1448, 1448, 1448, 656]);
            assert_eq!(sequences[1], 0xffff_ff00_u32.wrapping_add(1448));
            assert_eq!(payload, expected);
        }
    }

    #[test]
    fn missing_sum_is_made() {
        let (mut frame, tcp) = tcp4(0, 101);
        let pseudo = add(add(0, &frame[tcp - 8..tcp]), &[0, 6]) + (frame.len() - tcp) as u64;
        frame[tcp + 16..tcp + 18].copy_from_slice(&(!finish(pseudo)).to_be_bytes());
        let checked = NetHeader::checked(&header(0, 0, tcp), &frame, frame.len()).unwrap();
        assert!(!checked.suits(Accepts::default()) && checked.suits(ALL));
        let mut count = 0;
        checked.translate(&mut frame, |whole| {
            count += 1;
            assert_eq!(finish(add(pseudo, &whole[tcp..])), 0);
            ControlFlow::Continue(())
        });
        assert_eq!(count, 1);
    }

    #[test]
    fn sum_that_is_not_one_of_the_transport_is_rejected() {
        let (frame, tcp) = tcp4(0, 100);
        let sum = |start: usize, offset: u8, frame: &[u8]| {
            let bytes = [1, 0, 0, 0, 0, 0, u8::try_from(start).unwrap(), 0, offset, 0];
            NetHeader::checked(&bytes, frame, frame.len()).is_some()
        };
        assert!(sum(tcp, 16, &frame));
        assert!(!sum(14, 12, &frame) && !sum(tcp, 6, &frame), "the source of IPv4");
        assert!(!sum(tcp - 8, 0, &frame) && !sum(tcp + 2, 16, &frame));
        let mut other = frame.clone();
        other[23] = 17;
        assert!(sum(tcp, 6, &other) && !sum(tcp, 16, &other));
        assert!(NetHeader::checked(&header(GSO_TCPV4, 1448, tcp), &other, other.len()).is_none());
        other[23] = 1;
        assert!(!sum(tcp, 16, &other), "ICMP");
        for fragment in [0x20, 0x01] {
            let mut other = frame.clone();
            other[20] = fragment;
            assert!(!sum(tcp, 16, &other), "a fragment");
        }
        let mut other = frame.clone();
        other[14] = 0x46;
        assert!(!sum(tcp, 16, &other) && sum(tcp + 4, 16, &other), "IPv4 options");
        let arp = [&frame[..12], &[8, 6], &frame[14..]].concat();
        assert!(!sum(tcp, 16, &arp) && !sum(14, 14, &arp), "the sender in ARP");

        // Destination options in front of the transport.
        let six = |next: u8| {
            let mut six = [&frame[..12], &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 60, 64], &[7; 32]].concat();
            six.extend([next, 0, 1, 4, 0, 0, 0, 0]);
            six.extend(&frame[tcp..]);
            six
        };
        assert!(sum(62, 16, &six(6)) && !sum(54, 16, &six(6)) && !sum(62, 16, &six(17)) && sum(62, 6, &six(17)));
        let segments = |next| NetHeader::checked(&header(GSO_TCPV6, 1448, 62), &six(next), 162 + 20).is_some();
        assert!(segments(6) && !segments(17) && !segments(44) && !segments(59));
    }

    #[test]
    fn segments_of_a_few_bytes_are_rejected() {
        let (frame, tcp) = tcp4(0, 4000);
        let check = |size| NetHeader::checked(&header(GSO_TCPV4, size, tcp), &frame, frame.len()).is_some();
        assert!(!check(7) && check(8));
    }

    #[test]
    fn header_that_contradicts_its_frame_is_rejected() {
        let (frame, tcp) = tcp4(0, 4000);
        let check = |bytes: [u8; SHORT], frame: &[u8]| NetHeader::checked(&bytes, frame, frame.len());
        let good = header(GSO_TCPV4, 1448, tcp);
        assert!(check(good, &frame).is_some());
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            bytes
        };
        assert!(check(with(0, 0), &frame).is_none(), "segments without sums");
        assert!(check(with(1, GSO_TCPV6), &frame).is_none(), "IPv6 in its header, IPv4 in the frame");
        assert!(check(with(1, 3), &frame).is_none(), "UFO was not offered");
        assert!(check(with(1, 0x81), &frame).is_none(), "ECN was not offered");
        assert!(
            check(header(GSO_TCPV4, 0, tcp), &frame).is_none() && check(header(GSO_TCPV4, 1, tcp), &frame).is_none()
        );
        assert!(
            check(with(6, 0), &frame).is_none()
                && check(with(7, 0x20), &frame).is_none()
                && check(with(8, 6), &frame).is_none()
        );
        let mut long = frame.clone();
        long[tcp + 12] = 0x40;
        assert!(check(good, &long).is_none(), "a TCP header of 16 bytes");
        assert!(NetHeader::checked(&[0; SHORT], &frame, LONGEST + 1).is_none());
        assert!(NetHeader::checked(&[0; SHORT], &frame, 13).is_none());
        // Meaningless fields are not passed on.
        assert_eq!(
            check([2, 0, 9, 9, 9, 9, 9, 9, 9, 9], &frame).map(|h| h.bytes(1)),
            Some([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0])
        );
    }

    fn check_cut(header: [u8; LONG], frame: &[u8]) -> Option<NetHeader> {
        NetHeader::checked(header.first_chunk().unwrap(), &frame[..frame.len().min(crate::switch::HEAD)], frame.len())
    }

    #[test]
    fn large_frame_becomes_the_datagrams_that_were_meant() {
        let mut chance = Random(0x5851_f42d_4c95_7f2d);
        for round in 0..3000 {
            let (v6, tags, id) = (round % 2 == 1, chance.below(3) as usize, chance.next() as u16);
            let size = [1, 7, 8, 9, 512, 1472][chance.below(6) as usize];
            let pieces = 2 + chance.below(if size < 8 { 126 } else { 40 }) as usize;
            let last = 1 + chance.below(size as u64) as usize;
            let mut payload = chance.bytes((pieces - 1) * size + last);
            let zero = round % 4 < 2 && size > 1;
            if zero {
                // The datagram whose sum is 0, which is written as 0xffff.
                payload[..2].fill(0);
                let first = datagram(v6, tags, id, &payload[..size]);
                payload[..2].copy_from_slice(&first[udp_at(v6, tags) + 6..][..2]);
            }
            let mut frame = datagram(v6, tags, id, &payload);
            // Of the large frame only the sum of the pseudo header would be there, and nothing relies on it.
            frame[udp_at(v6, tags) + 6..][..2].fill(0x5a);
            let header = check_cut(cut_header(v6, tags, size as u16), &frame).unwrap();
            assert!(header.suits(ALL) && !header.suits(Accepts { csum: false, ..ALL }));
            assert!(!header.suits(Accepts { uso4: v6, uso6: !v6, ..ALL }));
            assert!(header.suits(Accepts { tso4: false, tso6: false, uso4: !v6, uso6: v6, csum: true }));
            assert_eq!(header.segments(frame.len()), pieces);
            let mut meant = payload.chunks(size).zip(0_u16..);
            header.translate(&mut frame, |got| {
                let (piece, n) = meant.next().expect("one datagram too many");
                assert!(got == datagram(v6, tags, id.wrapping_add(n), piece), "datagram {n} of round {round}");
                if zero && n == 0 {
                    assert_eq!(got[udp_at(v6, tags) + 6..][..2], [0xff, 0xff]);
                }
                ControlFlow::Continue(())
            });
            assert!(meant.next().is_none(), "round {round}");
        }
    }

    #[test]
    fn header_of_datagrams_that_contradicts_its_frame_is_rejected() {
        for v6 in [false, true] {
            let (frame, at) = (datagram(v6, 0, 1, &[7; 4000]), udp_at(v6, 0) as u8);
            let good = cut_header(v6, 0, 1472);
            let with = |place: usize, value: u8| {
                let mut bytes = good;
                bytes[place] = value;
                check_cut(bytes, &frame).is_some()
            };
            assert!(with(1, 5) && with(2, 255) && with(3, 255), "the length of headers is not believed");
            assert!(!with(0, 0), "datagrams without sums");
            assert!(!with(1, 1) && !with(1, 4), "TCP in its header, UDP in the frame");
            assert!(!with(1, 3), "UFO was not offered");
            assert!(!with(1, 0x85), "ECN was not offered");
            assert!(!with(6, at + 2) && !with(6, 255) && !with(7, 0xff) && !with(8, 16) && !with(9, 1));
            let sized = |size: u16| check_cut(cut_header(v6, 0, size), &frame);
            assert!(sized(0).is_none() && sized(4001).is_none() && sized(u16::MAX).is_none());
            assert_eq!(sized(4000).map(|header| header.bytes(1)[1..6].to_vec()), Some(vec![0; 5]), "one datagram");
            let mut tcp = frame.clone();
            tcp[if v6 { 54 } else { 23 }] = 6;
            assert!(check_cut(good, &tcp).is_none(), "UDP in its header, TCP in the frame");
            // The sum field is where TCP has its own.
            let mut bytes = good;
            bytes[8] = 16;
            assert!(check_cut(bytes, &tcp).is_none());
            let short = datagram(v6, 0, 1, &[]);
            assert!(check_cut(good, &short).is_none() && check_cut(good, &short[..short.len() - 1]).is_none());
        }
        let mut fragment = datagram(false, 0, 1, &[7; 4000]);
        fragment[20] = 0x20;
        assert!(check_cut(cut_header(false, 0, 1472), &fragment).is_none());
    }

    #[test]
    fn very_many_datagrams_of_one_frame_are_rejected() {
        let check = |size, length| check_cut(cut_header(false, 0, size), &datagram(false, 0, 1, &vec![7; length]));
        assert!(check(1, 128).is_some() && check(1, 129).is_none());
        assert!(check(7, 128 * 7).is_some() && check(7, 128 * 7 + 1).is_none());
        assert!(check(8, 2048 * 8).is_some() && check(8, 2048 * 8 + 1).is_none());
    }
}
