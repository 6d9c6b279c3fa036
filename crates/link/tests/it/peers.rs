//! Peers that are not what they should be.

use std::sync::atomic::Ordering;
use std::time::Duration;

use link::{Credentials, LinkError};
use testkit::node::FakeNode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::place::{BOUND, TestServer, hello, node_id, until};
use crate::raw;

fn refusal(error: LinkError) -> String {
    match error {
        LinkError::Refused(refusal) => {
            assert!(refusal.is_lasting, "{refusal}");
            refusal.reason
        }
        LinkError::Connect { .. } | LinkError::Trust(_) => panic!("{error:?}"),
    }
}

fn is_cut(error: &LinkError) -> bool {
    matches!(error, LinkError::Connect { .. })
}

#[tokio::test]
async fn a_token_makes_one_node_of_one_server() {
    let (place, other) = (TestServer::new().await, TestServer::new().await);
    let token = place.token(1);
    // The secret is not sent to a server that is not the one of the token.
    let error = link::join(&other.address, &token, "a host").await.unwrap_err();
    assert!(is_cut(&error), "{error:?}");
    link::join(&place.address, &token, "a host").await.unwrap();
    let error = link::join(&place.address, &token, "a host").await.unwrap_err();
    assert!(refusal(error).contains("used already"));
    assert!(!format!("{token:?}").contains(&token.expose()));
    place.close().await;
    other.close().await;
}

#[tokio::test]
async fn only_certificates_of_its_own_authority_are_taken_by_either_side() {
    let (place, other) = (TestServer::new().await, TestServer::new().await);
    let (own, foreign) = (place.joined().await, other.joined().await);
    let mixed = Credentials {
        authority: own.authority.clone(),
        ..foreign.clone()
    };
    let error = link::connect(&place.address, &mixed, &hello()).await.unwrap_err();
    assert!(is_cut(&error), "{error:?}");
    // The other way round: this server is not the one that the node has joined.
    let error = link::connect(&place.address, &foreign, &hello()).await.unwrap_err();
    assert!(is_cut(&error), "{error:?}");
    link::connect(&place.address, &own, &hello()).await.unwrap();
    place.close().await;
    other.close().await;
}

#[tokio::test]
async fn a_peer_without_a_certificate_can_only_join() {
    let place = TestServer::new().await;
    for kind in ["hello", "renew"] {
        let mut stream = raw::connect(place.socket, &place.authority, None).await.unwrap();
        let text = format!(r#"{{"kind":"{kind}","levels":[1],"name":"","version":"","request":""}}"#);
        let answer = raw::ask(&mut stream, &text).await.unwrap();
        assert!(
            answer.contains("refused") && answer.contains("no certificate"),
            "{answer}"
        );
    }
    assert!(!place.hub.has_session(&node_id(1)));
    place.close().await;
}

#[tokio::test]
async fn a_forgotten_node_is_cut_and_refused() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let node = credentials.node().unwrap();
    let serving = place.connected(&FakeNode::new(), &credentials).await;
    assert_eq!(place.hub.connected(&node).unwrap().id, node);
    place.known.members.lock().clear();
    place.hub.expel(&node);
    assert!(place.session().over.is_cancelled());
    tokio::time::timeout(BOUND, serving).await.unwrap().unwrap();
    until(|| place.hub.connected(&node).is_none() && !place.session().node.is_connected()).await;
    for error in [
        link::connect(&place.address, &credentials, &hello())
            .await
            .map(|_| ())
            .unwrap_err(),
        link::renew(&place.address, &credentials).await.map(|_| ()).unwrap_err(),
    ] {
        assert!(refusal(error).contains("forgotten"));
    }
    place.close().await;
}

#[tokio::test]
async fn a_node_that_is_forgotten_while_it_connects_is_refused() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    place.known.forgets.store(true, Ordering::SeqCst);
    let refused = link::connect(&place.address, &credentials, &hello()).await.map(|_| ());
    assert!(refusal(refused.unwrap_err()).contains("forgotten"));
    assert!(place.hub.connected(&node_id(1)).is_none());
    // What was begun for it is over.
    let session = place.session();
    assert!(session.over.is_cancelled() && !session.node.is_connected());
    place.close().await;
}

#[tokio::test]
async fn a_certificate_is_renewed_for_the_same_node() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let renewed = link::renew(&place.address, &credentials).await.unwrap();
    assert_eq!(renewed.node().unwrap(), credentials.node().unwrap());
    assert_ne!(renewed.certificate, credentials.certificate);
    assert_ne!(*renewed.key, *credentials.key);
    let soon = renewed.ends().unwrap() - Duration::from_secs(59 * 24 * 60 * 60);
    assert!(renewed.is_due(soon) && !renewed.is_due(soon - Duration::from_secs(7 * 24 * 60 * 60)));
    link::connect(&place.address, &renewed, &hello()).await.unwrap();
    place.close().await;
}

#[tokio::test]
async fn a_frame_that_is_too_large_ends_the_connection() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    for shown in [None, Some(&credentials)] {
        let mut stream = raw::connect(place.socket, &place.authority, shown).await.unwrap();
        stream.write_u32(u32::MAX).await.unwrap();
        let mut rest = Vec::new();
        let read = tokio::time::timeout(BOUND, stream.read_to_end(&mut rest)).await;
        let _ = read.expect("the server ends the connection");
        assert!(rest.is_empty());
    }
    place.close().await;
}

#[tokio::test]
async fn an_older_tls_is_refused() {
    let place = TestServer::new().await;
    let error = raw::connect_with(place.socket, &place.authority, None, &[&rustls::version::TLS12]).await;
    assert!(error.is_err());
    place.close().await;
}

#[tokio::test]
async fn silent_peers_make_room() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(TcpStream::connect(place.socket).await.unwrap());
    }
    // They are accepted in order, so the next one takes the place of the first.
    silent.push(TcpStream::connect(place.socket).await.unwrap());
    let mut byte = [0];
    let read = tokio::time::timeout(BOUND, silent[0].read(&mut byte)).await;
    assert!(matches!(read.expect("the server ends the connection"), Ok(0) | Err(_)));
    // A node gets in at its first attempt.
    link::connect(&place.address, &credentials, &hello()).await.unwrap();
    drop(silent);
    place.close().await;
}

#[tokio::test]
async fn a_node_that_does_not_speak_the_protocol_is_cut() {
    let place = TestServer::new().await;
    let credentials = place.joined().await;
    // It answers the hello and then speaks no HTTP/2.
    let (_, mut connection) = link::connect(&place.address, &credentials, &hello()).await.unwrap();
    connection.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    until(|| place.hub.connected(&node_id(1)).is_none()).await;
    assert!(!place.session().node.is_connected());
    place.close().await;
}
