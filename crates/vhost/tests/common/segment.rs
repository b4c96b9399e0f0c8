//! Frames with one segment of TCP, their sums made word by word.

use super::datagram::ones_complement;

/// The place of the header of TCP in [`segment`], behind this many VLAN tags.
pub(crate) fn tcp_at(v6: bool, tags: usize) -> usize {
    14 + 4 * tags + if v6 { 40 } else { 20 }
}

/// The tags of a frame, outermost first: a priority and a network each.
const TAGS: [[u8; 4]; 2] = [[0x88, 0xa8, 0x60, 5], [0x81, 0, 0x20, 7]];

/// The segment `n` of a stream that is cut every `size` bytes, from station 1 to station 2. `last` sets PSH.
pub(crate) fn segment(v6: bool, tags: usize, n: usize, size: usize, payload: &[u8], last: bool) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    frame.extend(TAGS[2 - tags..].concat());
    let tcp_length = (20 + payload.len()) as u16;
    let addresses: Vec<u8>;
    if v6 {
        addresses = [&[0xfd; 15][..], &[1], &[0xfd; 15], &[2]].concat();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(tcp_length.to_be_bytes());
        frame.extend([6, 64]);
        frame.extend(&addresses);
    } else {
        addresses = vec![10, 0, 0, 1, 10, 0, 0, 2];
        frame.extend([8, 0]);
        let id = 100 + n as u16;
        let mut ip = [&[0x45, 0][..], &(20 + tcp_length).to_be_bytes(), &id.to_be_bytes()].concat();
        ip.extend([0x40, 0, 64, 6, 0, 0]);
        ip.extend(&addresses);
        let sum = ones_complement(&ip).to_be_bytes();
        ip[10..12].copy_from_slice(&sum);
        frame.extend(ip);
    }
    // The sequence numbers pass the end of their range.
    let sequence = 0xffff_f000_u32.wrapping_add((n * size) as u32);
    let mut tcp =
        [&[1, 2, 3, 4][..], &sequence.to_be_bytes(), &[0, 0, 0, 9, 0x50, if last { 0x18 } else { 0x10 }]].concat();
    tcp.extend([1, 1, 0, 0, 0, 0]);
    tcp.extend(payload);
    let sum = ones_complement(&[&addresses[..], &[0, 6], &tcp_length.to_be_bytes(), &tcp].concat());
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    frame.extend(tcp);
    frame
}

/// A frame of all `payload` for a device that cuts it every `size` bytes, and its header. The sum is that of the pseudo header.
pub(crate) fn large_segment(v6: bool, tags: usize, size: u16, payload: &[u8]) -> ([u8; 12], Vec<u8>) {
    let at = tcp_at(v6, tags);
    let mut frame = segment(v6, tags, 0, 0, payload, true);
    let addresses = if v6 { &frame[at - 32..at] } else { &frame[at - 8..at] };
    let length = (20 + payload.len() as u16).to_be_bytes();
    let sum = !ones_complement(&[addresses, &[0, 6], &length].concat());
    frame[at + 16..at + 18].copy_from_slice(&sum.to_be_bytes());
    let [low, high] = size.to_le_bytes();
    let kind = if v6 { 4 } else { 1 };
    ([1, kind, at as u8 + 20, 0, low, high, at as u8, 0, 16, 0, 0, 0], frame)
}

/// The frames that a receiver without offloads gets in place of [`large_segment`].
pub(crate) fn segments(v6: bool, tags: usize, size: u16, payload: &[u8]) -> Vec<Vec<u8>> {
    let size = usize::from(size);
    let count = payload.len().div_ceil(size);
    let piece = |(n, piece)| segment(v6, tags, n, size, piece, n + 1 == count);
    payload.chunks(size).enumerate().map(piece).collect()
}
