#[path = "../../../tests/it/clock.rs"]
mod clock;
mod policy;
mod server;

use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode};
use hickory_proto::rr::DNSClass;
use hickory_proto::rr::rdata::{A, AAAA, CNAME, SOA, TXT};
use model::network::EgressPolicy;
use tokio::time::{advance, pause, resume};

use self::clock::Clock;
use self::server::{TestServer, empty, failure, record, with};
use super::*;

fn resolver_of(servers: &[SocketAddr]) -> Resolver {
    let hosts = [
        ("Table.example", &["192.0.2.7", "2001:db8::7"][..]),
        ("none.example.", &[]),
    ];
    let hosts = hosts.map(|(name, addresses)| {
        let addresses = addresses.iter().map(|address| address.parse().unwrap());
        (name.to_owned(), addresses.collect())
    });
    let mut resolver = Resolver::new(ResolverSettings {
        servers: servers.to_vec(),
        hosts: hosts.into(),
        ..ResolverSettings::default()
    });
    resolver.ipv6 = Ipv6Route::fixed(true);
    resolver
}

fn resolver(server: &TestServer) -> Resolver {
    resolver_of(&[server.address])
}

fn client() -> Client {
    Client::new(Arc::default(), true, 100)
}

fn a(last: u8) -> RData {
    RData::A(A::new(192, 0, 2, last))
}

fn aaaa(last: u16) -> RData {
    RData::AAAA(AAAA::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last))
}

fn soa(ttl: u32, minimum: u32) -> Record {
    let name = || Name::from_ascii("ns.example.").unwrap();
    record(
        "example.",
        ttl,
        RData::SOA(SOA::new(name(), name(), 1, 2, 3, 4, minimum)),
    )
}

fn query(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(0x1234, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

async fn send(resolver: &Resolver, client: &Client, query: &Message) -> Message {
    let reply = resolver
        .answer(&query.to_vec().unwrap(), Transport::Udp, client)
        .await
        .unwrap();
    let message = Message::from_vec(&reply).unwrap();
    assert_eq!(message.metadata.id, query.metadata.id);
    assert_eq!(message.metadata.message_type, MessageType::Response);
    assert!(message.metadata.recursion_available);
    message
}

async fn resolve(resolver: &Resolver, client: &Client, name: &str, kind: RecordType) -> Message {
    let query = query(name, kind);
    let reply = send(resolver, client, &query).await;
    assert_eq!(reply.queries, query.queries);
    assert!(reply.queries[0].name.eq_case(&query.queries[0].name));
    reply
}

fn data(message: &Message) -> Vec<RData> {
    message.answers.iter().map(|record| record.data.clone()).collect()
}

fn ttls(message: &Message) -> Vec<u32> {
    message.all_sections().map(|record| record.ttl).collect()
}

#[tokio::test(start_paused = true)]
async fn the_cache_answers_until_an_answer_expires() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1), a(2)])).await;
    let resolver = resolver(&server);
    let client = client();
    let first = resolve(&resolver, &client, "A.example.", RecordType::A).await;
    assert_eq!(data(&first), [a(1), a(2)]);
    assert_eq!(ttls(&first), [30, 30]);
    advance(Duration::from_millis(12_300)).await;
    let other = Client::new(Arc::default(), true, 100);
    let second = resolve(&resolver, &other, "a.EXAMPLE.", RecordType::A).await;
    assert_eq!(data(&second), [a(1), a(2)]);
    assert_eq!(ttls(&second), [18, 18]);
    assert!(second.answers[0].name.eq_case(&second.queries[0].name));
    advance(Duration::from_millis(17_600)).await;
    assert_eq!(
        ttls(&resolve(&resolver, &client, "a.example.", RecordType::A).await),
        [1, 1]
    );
    assert_eq!(server.count(), 1);
    advance(Duration::from_millis(200)).await;
    assert_eq!(
        ttls(&resolve(&resolver, &client, "a.example.", RecordType::A).await),
        [30, 30]
    );
    assert_eq!(server.count(), 2);
    let counters = DnsCounters {
        queries: 4,
        cache_hits: 2,
        forwarded: 2,
        ..DnsCounters::default()
    };
    assert_eq!(resolver.counters(), counters);
    // What the server was asked.
    let (_, query) = server.queries.lock()[0].clone();
    assert!(query.queries[0].name.eq_case(&Name::from_ascii("a.example.").unwrap()));
    assert!(query.metadata.recursion_desired);
    let edns = query.edns.unwrap();
    assert_eq!((edns.max_payload(), edns.flags().dnssec_ok), (1232, false));
    // What the sandbox was told.
    let name = |text: &str| client.name_of(text.parse().unwrap());
    assert_eq!(name("192.0.2.2").as_deref(), Some("a.example"));
    assert_eq!(name("192.0.2.3"), None);
}

#[tokio::test(start_paused = true)]
async fn times_to_live_have_bounds() {
    let _clock = Clock::hold();
    for (sent, found) in [(0, 1), (1, 1), (86400, 3600), (u32::MAX, 1)] {
        let server = TestServer::start(move |query, _| with(query, sent, &[a(1)])).await;
        let reply = resolve(&resolver(&server), &client(), "a.example.", RecordType::A).await;
        assert_eq!(ttls(&reply), [found]);
    }
    for (ttl, minimum, found) in [(60, 30, 30), (20, 30, 20), (0, 0, 1), (86400, 86400, 300)] {
        let server = TestServer::start(move |query, _| {
            let mut message = empty(query);
            message.metadata.response_code = ResponseCode::NXDomain;
            message.authorities.push(soa(ttl, minimum));
            vec![message.to_vec().unwrap()]
        })
        .await;
        let resolver = resolver(&server);
        for _ in 0..2 {
            let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
            assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
            assert_eq!(reply.authorities.len(), 1);
            assert_eq!(ttls(&reply), [found]);
        }
        assert_eq!(server.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn no_data_without_a_time_is_kept_for_a_second() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| vec![empty(query).to_vec().unwrap()]).await;
    let resolver = resolver(&server);
    for _ in 0..2 {
        let reply = resolve(&resolver, &client(), "a.example.", RecordType::MX).await;
        assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
        assert_eq!(reply.all_sections().count(), 0);
    }
    assert_eq!(server.count(), 1);
    advance(Duration::from_secs(1)).await;
    resolve(&resolver, &client(), "a.example.", RecordType::MX).await;
    assert_eq!(server.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn only_records_of_the_question_are_kept() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| {
        let mut message = empty(query);
        let alias = |name: &str, target: &str| record(name, 50, RData::CNAME(CNAME(Name::from_ascii(target).unwrap())));
        message.answers = vec![
            record("c.example.", 40, a(1)),
            record("victim.example.", 40, a(66)),
            alias("B.example.", "c.example."),
            alias("a.example.", "b.Example."),
            alias("victim.example.", "c.example."),
            record("a.example.", 40, aaaa(66)),
        ];
        message.authorities.push(soa(1, 1));
        message.additionals.push(record("victim.example.", 40, a(66)));
        vec![message.to_vec().unwrap()]
    })
    .await;
    let resolver = resolver(&server);
    let client = client();
    let reply = resolve(&resolver, &client, "a.example.", RecordType::A).await;
    let names: Vec<_> = reply.all_sections().map(|record| record.name.to_ascii()).collect();
    assert_eq!(names, ["a.example.", "B.example.", "c.example."]);
    assert_eq!(ttls(&reply), [40; 3]);
    assert_eq!(client.name_of([192, 0, 2, 1].into()).as_deref(), Some("a.example"));
    assert_eq!(client.name_of([192, 0, 2, 66].into()), None);
    resolve(&resolver, &client, "victim.example.", RecordType::A).await;
    assert_eq!(server.count(), 2);
}

#[tokio::test]
async fn an_soa_of_another_zone_is_dropped() {
    let server = TestServer::start(|query, _| {
        let mut message = empty(query);
        message.authorities.push(soa(60, 60));
        vec![message.to_vec().unwrap()]
    })
    .await;
    let resolver = resolver(&server);
    for (name, found) in [("a.other.", 0), ("anexample.", 0), ("a.b.EXAMPLE.", 1), ("example.", 1)] {
        let reply = resolve(&resolver, &client(), name, RecordType::A).await;
        assert_eq!(reply.authorities.len(), found, "{name}");
    }
}

#[tokio::test]
async fn aliases_that_go_round_end() {
    let server = TestServer::start(|query, _| {
        let mut message = empty(query);
        for (name, target) in [("a.example.", "b.example."), ("b.example.", "a.example.")] {
            message
                .answers
                .push(record(name, 9, RData::CNAME(CNAME(Name::from_ascii(target).unwrap()))));
        }
        vec![message.to_vec().unwrap()]
    })
    .await;
    let resolver = resolver(&server);
    let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
    assert_eq!(reply.answers.len(), 16);
    let error = resolver.addresses("a.example", &client()).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[tokio::test]
async fn truncated_answers_come_by_tcp() {
    let server = TestServer::start(|query, transport| match transport {
        Transport::Udp => {
            let mut message = empty(query);
            message.metadata.truncation = true;
            vec![message.to_vec().unwrap()]
        }
        Transport::Tcp => with(query, 30, &(0..200).map(a).collect::<Vec<_>>()),
    })
    .await;
    let resolver = resolver(&server);
    let client = client();
    let mut query = query("a.example.", RecordType::A);
    let ask = async |query: &Message, transport| {
        let reply = resolver
            .answer(&query.to_vec().unwrap(), transport, &client)
            .await
            .unwrap();
        (reply.len(), Message::from_vec(&reply).unwrap())
    };
    // 27 bytes for header and question, 16 for each record, 11 for OPT.
    let (length, reply) = ask(&query, Transport::Udp).await;
    assert_eq!((length, reply.answers.len()), (27 + 30 * 16, 30));
    assert!(reply.metadata.truncation && reply.edns.is_none());
    for (announced, records) in [(512, 29), (600, 35), (1232, 74), (4096, 74), (0, 29)] {
        let mut edns = Edns::new();
        edns.set_max_payload(announced);
        query.set_edns(edns);
        let (length, reply) = ask(&query, Transport::Udp).await;
        assert_eq!((length, reply.answers.len()), (27 + records * 16 + 11, records));
        assert!(reply.metadata.truncation);
        assert_eq!(reply.edns.unwrap().max_payload(), 1232);
    }
    let (_, reply) = ask(&query, Transport::Tcp).await;
    assert_eq!(reply.answers.len(), 200);
    assert!(!reply.metadata.truncation);
    let transports: Vec<_> = server.queries.lock().iter().map(|(transport, _)| *transport).collect();
    assert_eq!(transports, [Transport::Udp, Transport::Tcp]);
}

#[tokio::test]
async fn responses_are_bounded() {
    let server = TestServer::start(|query, transport| {
        let mut message = empty(query);
        message.metadata.truncation = transport == Transport::Udp;
        let (records, data) = match query.queries[0].name.to_ascii().as_str() {
            "256.example." => (256, a(1)),
            "257.example." => (257, a(1)),
            "16000.example." => (100, RData::TXT(TXT::new(vec!["x".repeat(147)]))),
            _ => (100, RData::TXT(TXT::new(vec!["x".repeat(155)]))),
        };
        if transport == Transport::Tcp {
            return with(query, 30, &vec![data; records]);
        }
        vec![message.to_vec().unwrap()]
    })
    .await;
    let resolver = resolver(&server);
    for (name, kind, is_answered) in [
        ("256.example.", RecordType::A, true),
        ("257.example.", RecordType::A, false),
        ("16000.example.", RecordType::TXT, true),
        ("17000.example.", RecordType::TXT, false),
    ] {
        let reply = resolve(&resolver, &client(), name, kind).await;
        assert_eq!(
            reply.metadata.response_code == ResponseCode::NoError,
            is_answered,
            "{name}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn unrelated_responses_are_ignored() {
    let _clock = Clock::hold();
    let other = Arc::new(Mutex::new(None));
    let kept = other.clone();
    let server = TestServer::start(move |query, _| {
        let changed = |change: &dyn Fn(&mut Message)| {
            let mut message = Message::from_vec(&with(query, 30, &[a(66)])[0]).unwrap();
            change(&mut message);
            message.to_vec().unwrap()
        };
        *kept.lock() = Some(query.metadata.id);
        let mut replies = vec![
            changed(&|message| message.metadata.id ^= 1),
            changed(&|message| message.queries[0].name = Name::from_ascii("b.example.").unwrap()),
            changed(&|message| message.queries[0].query_type = RecordType::AAAA),
            changed(&|message| message.metadata.message_type = MessageType::Query),
            changed(&|message| message.queries.clear()),
            b"short".to_vec(),
        ];
        replies.extend(with(query, 30, &[a(1)]));
        replies
    })
    .await;
    let resolver = resolver(&server);
    let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
    assert_eq!(data(&reply), [a(1)]);
    assert_eq!(server.count(), 1);
    assert!(other.lock().is_some());
}

#[tokio::test(start_paused = true)]
async fn too_many_unrelated_responses_are_a_failure() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| {
        let mut replies = with(query, 30, &[a(1)]);
        replies.splice(0..0, vec![vec![0; 20]; 8]);
        replies
    })
    .await;
    let resolver = resolver(&server);
    let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert_eq!(server.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn other_hosts_cannot_answer() {
    let _clock = Clock::hold();
    // A datagram from another address than that of the server does not arrive at a connected socket.
    let attacker = std::net::UdpSocket::bind("127.0.0.2:0").unwrap();
    let server = TestServer::start(|_, _| Vec::new()).await;
    let second = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver_of(&[server.address, second.address]);
    let client = client();
    let asked = async {
        server.received.notified().await;
        let (_, query) = server.queries.lock()[0].clone();
        // The attacker has guessed the port and the id.
        let port = server.peer.lock().unwrap().port();
        attacker
            .send_to(&with(&query, 30, &[a(66)])[0], ("127.0.0.1", port))
            .unwrap();
        advance(Duration::from_secs(2)).await;
    };
    let (reply, ()) = tokio::join!(resolve(&resolver, &client, "a.example.", RecordType::A), asked);
    assert_eq!(data(&reply), [a(1)]);
}

#[tokio::test(start_paused = true)]
async fn the_next_server_is_asked() {
    let _clock = Clock::hold();
    let silent = TestServer::start(|_, _| Vec::new()).await;
    let failing = TestServer::start(|query, _| failure(query, ResponseCode::ServFail)).await;
    let refusing = TestServer::start(|query, _| failure(query, ResponseCode::Refused)).await;
    let malformed = TestServer::start(|query, _| {
        let mut bytes = with(query, 30, &[a(1)]).remove(0);
        bytes.truncate(bytes.len() - 1);
        vec![bytes]
    })
    .await;
    let good = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    for bad in [&failing, &refusing, &malformed] {
        let resolver = resolver_of(&[bad.address, good.address]);
        let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
        assert_eq!(data(&reply), [a(1)]);
        assert_eq!(bad.count(), 1);
    }
    let resolver = resolver_of(&[silent.address, good.address]);
    let client = client();
    let asked = async {
        silent.received.notified().await;
        advance(Duration::from_secs(2)).await;
    };
    let (reply, ()) = tokio::join!(resolve(&resolver, &client, "a.example.", RecordType::A), asked);
    assert_eq!(data(&reply), [a(1)]);
    assert_eq!((silent.count(), good.count()), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn silent_servers_are_a_failure() {
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let resolver = resolver_of(&[silent.local_addr().unwrap(); 2]);
    let start = Instant::now();
    let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert_eq!(start.elapsed().as_secs(), 8);
    // The failure is kept for a second.
    resolve(&resolver, &client(), "a.example.", RecordType::A).await;
    assert_eq!(start.elapsed().as_secs(), 8);
    assert_eq!((resolver.counters().failed, resolver.counters().cache_hits), (1, 1));
    advance(Duration::from_secs(1)).await;
    let error = resolver.addresses("a.example", &client()).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert_eq!(resolver.counters().failed, 3);
}

#[tokio::test]
async fn no_server_is_a_failure() {
    let mut resolver = resolver_of(&[]);
    resolver.host_servers = HostServers::new("/nonexistent/resolv.conf");
    let reply = resolve(&resolver, &client(), "a.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
}

#[tokio::test]
async fn old_servers_are_asked_without_edns() {
    let server = TestServer::start(|query, _| match query.edns {
        Some(_) => {
            let mut message = empty(query);
            message.queries.clear();
            message.metadata.response_code = ResponseCode::FormErr;
            vec![message.to_vec().unwrap()]
        }
        None => with(query, 30, &[a(1)]),
    })
    .await;
    let reply = resolve(&resolver(&server), &client(), "a.example.", RecordType::A).await;
    assert_eq!(data(&reply), [a(1)]);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_a_simple_query_is_an_error() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = client();
    let plain = || query("a.example.", RecordType::A);
    let changed = |change: &dyn Fn(&mut Message)| {
        let mut message = plain();
        change(&mut message);
        message
    };
    for (message, code) in [
        (
            changed(&|message| message.metadata.op_code = OpCode::Status),
            ResponseCode::NotImp,
        ),
        (
            changed(&|message| message.metadata.op_code = OpCode::Notify),
            ResponseCode::NotImp,
        ),
        (
            changed(&|message| message.queries[0].query_class = DNSClass::CH),
            ResponseCode::NotImp,
        ),
        (
            changed(&|message| message.queries[0].query_class = DNSClass::ANY),
            ResponseCode::NotImp,
        ),
        (changed(&|message| message.queries.clear()), ResponseCode::FormErr),
        (
            changed(&|message| message.answers.push(soa(1, 1))),
            ResponseCode::FormErr,
        ),
        (
            changed(&|message| message.authorities.push(soa(1, 1))),
            ResponseCode::FormErr,
        ),
        (
            changed(&|message| message.additionals = vec![soa(1, 1); 3]),
            ResponseCode::FormErr,
        ),
        (
            changed(&|message| message.additionals = vec![soa(1, 1); 256]),
            ResponseCode::FormErr,
        ),
        (
            changed(&|message| message.additionals = vec![soa(1, 1); 2]),
            ResponseCode::NoError,
        ),
        (
            changed(&|message| message.queries.push(Query::new())),
            ResponseCode::FormErr,
        ),
    ] {
        assert_eq!(send(&resolver, &client, &message).await.metadata.response_code, code);
    }
    let mut edns = Edns::new();
    edns.set_version(1);
    let mut message = plain();
    message.set_edns(edns);
    let reply = send(&resolver, &client, &message).await;
    // The same number as BADVERS.
    assert_eq!(u16::from(reply.metadata.response_code), 16);
    let bytes = plain().to_vec().unwrap();
    let code = async |bytes: &[u8]| {
        let reply = resolver.answer(bytes, Transport::Udp, &client).await?;
        Some(Message::from_vec(&reply).unwrap().metadata.response_code)
    };
    assert_eq!(code(&bytes[..11]).await, None);
    assert_eq!(code(&[]).await, None);
    assert_eq!(code(&bytes[..bytes.len() - 1]).await, Some(ResponseCode::FormErr));
    assert_eq!(
        code(&[&bytes[..], &[0; 4096]].concat()).await,
        Some(ResponseCode::FormErr)
    );
    let mut response = bytes.clone();
    response[2] |= 0x80;
    assert_eq!(code(&response).await, None);
    // Pointers to pointers.
    let mut pointers = bytes[..12].to_vec();
    pointers.extend([0xc0, 12 + 38]);
    pointers.resize(50, 0);
    let chain: Vec<u8> = (0..20u8).flat_map(|at| [0xc0, 48 + 2 * at]).collect();
    pointers.extend(chain);
    assert_eq!(code(&pointers).await, Some(ResponseCode::FormErr));
    assert_eq!(server.count(), 1);
    assert_eq!(code(&bytes).await, Some(ResponseCode::NoError));
}

#[tokio::test(start_paused = true)]
async fn the_same_question_is_sent_once() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let clients = [client(), client()];
    let ask = |at: usize| resolve(&resolver, &clients[at], "a.example.", RecordType::A);
    let replies = tokio::join!(ask(0), ask(1), ask(0), ask(1), ask(0));
    assert_eq!(data(&replies.4), [a(1)]);
    assert_eq!(server.count(), 1);
    assert_eq!(resolver.counters().forwarded, 1);
}

#[tokio::test(start_paused = true)]
async fn addresses_for_connections() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| {
        let name = query.queries[0].name.to_ascii();
        match (name.as_str(), query.queries[0].query_type) {
            ("ipv4.example." | "both.example.", RecordType::A) => with(query, 30, &[a(1), a(2)]),
            ("ipv6.example." | "both.example.", RecordType::AAAA) => with(query, 30, &[aaaa(1)]),
            ("ipv4.example.", _) => failure(query, ResponseCode::ServFail),
            ("none.test.", _) => failure(query, ResponseCode::NXDomain),
            _ => vec![empty(query).to_vec().unwrap()],
        }
    })
    .await;
    let resolver = resolver(&server);
    let client = client();
    let addresses = async |name: &str| {
        let found = resolver.addresses(name, &client).await;
        found
            .map(|found| found.iter().map(IpAddr::to_string).collect::<Vec<_>>())
            .map_err(|error| error.kind())
    };
    let expected = |addresses: &[&str]| Ok(addresses.iter().map(|address| (*address).to_owned()).collect());
    assert_eq!(
        addresses("both.example").await,
        expected(&["192.0.2.1", "192.0.2.2", "2001:db8::1"])
    );
    assert_eq!(addresses("IPv4.example.").await, expected(&["192.0.2.1", "192.0.2.2"]));
    assert_eq!(addresses("ipv6.example").await, expected(&["2001:db8::1"]));
    assert_eq!(addresses("none.test").await, Err(io::ErrorKind::NotFound));
    assert_eq!(addresses("empty.example").await, Err(io::ErrorKind::NotFound));
    for invalid in ["", "127.0.0.1", "::1", "a b", "127.1", "a..b"] {
        assert_eq!(addresses(invalid).await, Err(io::ErrorKind::InvalidInput), "{invalid}");
    }
    let asked = server.count();
    assert_eq!(addresses("both.example").await.unwrap().len(), 3);
    assert_eq!(server.count(), asked);
}

#[tokio::test(start_paused = true)]
async fn what_arrived_while_a_query_waited_is_not_asked_again() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let (slow, other) = (client(), client());
    let held = slow.forwarded.try_acquire_many(32).unwrap();
    let mut waiting = Box::pin(resolve(&resolver, &slow, "a.example.", RecordType::A));
    std::future::poll_fn(|context| {
        assert!(waiting.as_mut().poll(context).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    resolve(&resolver, &other, "a.example.", RecordType::A).await;
    drop(held);
    assert_eq!(data(&waiting.await), [a(1)]);
    assert_eq!(server.count(), 1);
}
