//! Memory of sockets that no limit counts: while a platform reads the events, and while one is connected but stopped.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;

use protocol::agent::{AgentEvent, EVENTS_PATH};
use protocol::connect::Codec;
use protocol::process::{ProcessConfig, StartRequest};
use rustix::net::{AddressFamily, Protocol, SendFlags, SocketFlags, SocketType, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::events::Told;
use crate::sandbox::Sandbox;

/// Raw sockets in a network that together hold far more than the agent allows. They share the pages of what they
/// received, so that it costs this machine little.
fn hoard(sandbox: &Sandbox) -> Vec<OwnedFd> {
    const SOCKETS: usize = 24;
    const PACKETS: usize = 150;
    const PACKET: usize = 60_000;
    /// Meant for experiments: nothing else receives it.
    const PROTOCOL: u32 = 253;
    sandbox.in_network(|| {
        let protocol = NonZeroU32::new(PROTOCOL).map(Protocol::from_raw);
        let socket = || {
            let socket =
                rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, protocol).unwrap();
            sockopt::set_socket_recv_buffer_size_force(&socket, 2 * PACKETS * PACKET).unwrap();
            socket
        };
        let sockets: Vec<OwnedFd> = (0..SOCKETS).map(|_| socket()).collect();
        let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
        for _ in 0..PACKETS {
            rustix::net::sendto(&sockets[0], &[0; PACKET], SendFlags::empty(), &to).unwrap();
        }
        sockets
    })
}

#[tokio::test]
async fn a_stopped_platform_is_as_good_as_none() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let config = ProcessConfig {
        cmd: "sleep".to_owned(),
        args: vec!["1000".to_owned()],
        ..ProcessConfig::default()
    };
    let request = StartRequest {
        process: Some(config),
        ..StartRequest::default()
    };
    let mut client = sandbox.client().await;
    let mut process = client.stream(Codec::Proto, "Start", &request).await;
    process.started().await;
    let mut host = sandbox.host().await;
    let mut told = Told::open(&mut host).await;
    let _hoard = hoard(&sandbox);
    // A platform that reads sees to it itself. At the second heartbeat it was found to have read the first.
    let mut heartbeats = 0;
    while heartbeats < 2 {
        match told.next().await.unwrap() {
            AgentEvent::Heartbeat => heartbeats += 1,
            AgentEvent::ProcessStart { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    // The next one takes over, and reads nothing.
    let mut stopped = sandbox.host_stream();
    let head = format!("GET {EVENTS_PATH} HTTP/1.1\r\nhost: agent\r\n\r\n");
    stopped.write_all(head.as_bytes()).await.unwrap();
    let rest = process.rest().await;
    assert_eq!(rest.exit().2, "signal: killed");
    let mut text = String::new();
    while !text.contains("spawner_gone") {
        let mut bytes = [0; 4096];
        let length = stopped.read(&mut bytes).await.unwrap();
        assert!(length > 0, "{text}");
        text += std::str::from_utf8(&bytes[..length]).unwrap();
    }
    assert!(text.contains("heartbeat") && text.contains("socket_memory"), "{text}");
}
