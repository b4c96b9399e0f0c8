//! The UDP socket between gateways: larger buffers than usual, and datagrams as large as the path carries.
//!
//! QUIC hands over several datagrams of one size at a time, which the kernel takes in one call if they fit into 64 KiB together.
//! [`GatewaySocket`] cuts what is longer into several calls.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};

/// The most bytes of a datagram by IPv4, and of all datagrams that the kernel takes in one call.
pub(crate) const LARGEST_DATAGRAM: u16 = 65_507;
/// Bytes of the kernel's buffers, each way. The kernel gives less where `net.core.rmem_max` and `net.core.wmem_max` say so. Its defaults hold
/// three of the largest datagrams.
const BUFFER: usize = 4 << 20;

/// The socket of this host's gateway.
#[derive(Debug)]
pub(crate) struct GatewaySocket(Arc<dyn AsyncUdpSocket>);

impl GatewaySocket {
    /// Listens; within a tokio runtime.
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let state = UdpSocketState::new((&socket).into())?;
        state.set_recv_buffer_size((&socket).into(), BUFFER)?;
        state.set_send_buffer_size((&socket).into(), BUFFER)?;
        Ok(Self(TokioRuntime.wrap_udp_socket(socket)?))
    }
}

impl AsyncUdpSocket for GatewaySocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.0).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let largest = usize::from(LARGEST_DATAGRAM);
        let Some(size) = transmit.segment_size.filter(|_| transmit.contents.len() > largest) else {
            return self.0.try_send(transmit);
        };
        let mut parts = transmit.contents.chunks((largest / size).max(1) * size);
        let send = |contents| self.0.try_send(&Transmit { contents, ..*transmit });
        // If the kernel has no room for the first part, all of it is sent again later.
        parts.next().map_or(Ok(()), send)?;
        // If it has none for another part, the rest counts as lost in transit. To send all of it again might never succeed.
        match parts.try_for_each(send) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            sent => sent,
        }
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.0.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.0.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        // The kernel joins datagrams up to the size of the largest one, for which each buffer has room.
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{HANG, in_time};

    #[tokio::test]
    async fn datagrams_beyond_64_kib_together_all_arrive() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(HANG)).unwrap();
        let sender = Arc::new(GatewaySocket::bind("127.0.0.1:0".parse().unwrap()).unwrap());
        let mut poller = Arc::clone(&sender).create_io_poller();
        in_time("the socket is writable", std::future::poll_fn(|cx| poller.as_mut().poll_writable(cx))).await.unwrap();
        let contents: Vec<u8> = (0..100_000u32).map(|n| (n % 251) as u8).collect();
        let destination = receiver.local_addr().unwrap();
        let transmit =
            Transmit { destination, ecn: None, contents: &contents, segment_size: Some(30_000), src_ip: None };
        sender.try_send(&transmit).unwrap();
        let mut buffer = vec![0; 1 << 16];
        for expected in contents.chunks(30_000) {
            let length = receiver.recv(&mut buffer).unwrap();
            assert!(buffer[..length] == *expected, "{length} bytes");
        }
    }
}
