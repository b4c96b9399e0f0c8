//! Frames with one datagram, their sums made word by word.
#![allow(dead_code, reason = "each test uses a part of it")]

/// The place of the header of UDP in [`datagram`], behind this many VLAN tags.
pub(crate) fn udp_at(v6: bool, tags: usize) -> usize {
    14 + 4 * tags + if v6 { 48 } else { 24 }
}

/// A frame from station 1 to station 2. IPv4 has an option, and IPv6 destination options.
pub(crate) fn datagram(v6: bool, tags: usize, id: u16, payload: &[u8]) -> Vec<u8> {
    let udp_length = (8 + payload.len()) as u16;
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    (0..tags).for_each(|_| frame.extend([0x81, 0, 0, 7]));
    let mut pseudo = vec![];
    if v6 {
        let addresses = [[0xfd; 15].as_slice(), &[1], &[0xfd; 15], &[2]].concat();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((udp_length + 8).to_be_bytes());
        frame.extend([60, 64]);
        frame.extend(&addresses);
        frame.extend([17, 0, 1, 4, 0, 0, 0, 0]);
        pseudo.extend(addresses);
    } else {
        frame.extend([8, 0]);
        let mut header = [&[0x46, 0][..], &(24 + udp_length).to_be_bytes(), &id.to_be_bytes()].concat();
        header.extend([0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 1, 1, 1, 0]);
        let sum = ones_complement(&header).to_be_bytes();
        header[10..12].copy_from_slice(&sum);
        frame.extend(header);
        pseudo.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    }
    let mut udp = [&[0x10, 0, 0, 9][..], &udp_length.to_be_bytes(), &[0, 0], payload].concat();
    pseudo.extend([0, 17]);
    pseudo.extend(udp_length.to_be_bytes());
    pseudo.extend(&udp);
    let sum = match ones_complement(&pseudo) {
        0 => 0xffff,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    frame.extend(udp);
    frame
}

/// The header that has a frame of [`datagram`] cut into datagrams of `size` bytes.
pub(crate) fn cut_header(v6: bool, tags: usize, size: u16) -> [u8; 12] {
    let [low, high] = size.to_le_bytes();
    let at = udp_at(v6, tags) as u8;
    [1, 5, at + 8, 0, low, high, at, 0, 6, 0, 0, 0]
}

/// The sum of the Internet, over bytes of which the last may be half of a word.
pub(crate) fn ones_complement(bytes: &[u8]) -> u16 {
    let mut sum = 0_u16;
    for word in bytes.chunks(2) {
        let word = u16::from(word[0]) << 8 | u16::from(word.get(1).copied().unwrap_or(0));
        let (added, carried) = sum.overflowing_add(word);
        sum = added + u16::from(carried);
    }
    !sum
}
