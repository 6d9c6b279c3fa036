//! What a sandbox may resolve, and how much.

use super::*;

/// A client that may only resolve these.
fn client_of(domains: &[&str]) -> Client {
    let policy = EgressPolicy {
        deny: vec![Cidr::ALL],
        allow_domains: domains.iter().map(|domain| domain.parse().unwrap()).collect(),
        ..EgressPolicy::default()
    };
    Client::new(Arc::new(policy), true)
}

#[tokio::test]
async fn names_outside_of_a_policy_are_refused() {
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = client_of(&["allowed.example", "*.below.example"]);
    for (name, kind) in [
        ("secret.attacker.example.", RecordType::A),
        ("a.allowed.example.", RecordType::TXT),
        ("below.example.", RecordType::A),
        ("4.3.2.1.in-addr.arpa.", RecordType::PTR),
        (".", RecordType::NS),
        ("a\\.allowed.example.", RecordType::A),
        ("x\\.y.below.example.", RecordType::A),
        ("secret.example.", RecordType::ANY),
        ("secret.example.", RecordType::HTTPS),
    ] {
        let reply = resolve(&resolver, &client, name, kind).await;
        assert_eq!(reply.metadata.response_code, ResponseCode::Refused, "{name}");
    }
    let error = resolver.addresses("secret.example", &client).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(server.count(), 0);
    assert_eq!(resolver.counters().refused, 11);
    for name in ["ALLOWED.example.", "a.b.below.example."] {
        assert_eq!(data(&resolve(&resolver, &client, name, RecordType::A).await), [a(1)]);
    }
    // The table of the operator is for all, and asks nobody.
    let reply = resolve(&resolver, &client, "table.example.", RecordType::A).await;
    assert_eq!(data(&reply), [a(7)]);
    assert_eq!(server.count(), 2);
    client.set_policy(Arc::default());
    assert_eq!(
        data(&resolve(&resolver, &client, "a\\.b.example.", RecordType::A).await),
        [a(1)]
    );
}

#[tokio::test]
async fn the_table_of_the_operator_answers() {
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = client();
    for (name, kind, expected) in [
        ("tAbLe.example.", RecordType::A, vec![a(7)]),
        ("table.example.", RecordType::AAAA, vec![aaaa(7)]),
        ("table.example.", RecordType::MX, vec![]),
        ("table.example.", RecordType::ANY, vec![]),
        ("none.example.", RecordType::A, vec![]),
    ] {
        let reply = resolve(&resolver, &client, name, kind).await;
        assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
        assert_eq!(data(&reply), expected);
        assert!(ttls(&reply).iter().all(|ttl| *ttl == 60));
    }
    let addresses = resolver.addresses("TABLE.example.", &client).await.unwrap();
    assert_eq!(
        addresses,
        ["192.0.2.7", "2001:db8::7"].map(|text| text.parse::<IpAddr>().unwrap())
    );
    assert_eq!(server.count(), 0);
    resolve(&resolver, &client, "a.table.example.", RecordType::A).await;
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn types_that_are_not_forwarded() {
    let server = TestServer::start(|query, _| with(query, 30, &[aaaa(1)])).await;
    let mut resolver = resolver(&server);
    let client = client();
    for (kind, code) in [
        (RecordType::HTTPS, ResponseCode::NoError),
        (RecordType::SVCB, ResponseCode::NoError),
        (RecordType::AXFR, ResponseCode::Refused),
        (RecordType::IXFR, ResponseCode::Refused),
        (RecordType::OPT, ResponseCode::NotImp),
        (RecordType::TSIG, ResponseCode::NotImp),
        (RecordType::Unknown(253), ResponseCode::NotImp),
        (RecordType::ZERO, ResponseCode::NotImp),
    ] {
        let reply = resolve(&resolver, &client, "a.example.", kind).await;
        assert_eq!((reply.metadata.response_code, reply.answers.len()), (code, 0), "{kind}");
    }
    let reply = resolve(&resolver, &client, "a.example.", RecordType::ANY).await;
    let hinfo = RData::HINFO(HINFO::new("RFC8482".to_owned(), String::new()));
    assert_eq!(data(&reply), [hinfo]);
    resolver.ipv6 = Ipv6Route::fixed(false);
    assert_eq!(
        resolve(&resolver, &client, "a.example.", RecordType::AAAA)
            .await
            .answers,
        []
    );
    assert_eq!(server.count(), 0);
    resolver.ipv6 = Ipv6Route::fixed(true);
    assert_eq!(
        data(&resolve(&resolver, &client, "a.example.", RecordType::AAAA).await),
        [aaaa(1)]
    );
}

#[tokio::test]
async fn other_types_are_forwarded() {
    let server = TestServer::start(|query, _| {
        let text = RData::TXT(TXT::new(vec!["x".repeat(200); 3]));
        with(query, 30, &[text])
    })
    .await;
    let reply = resolve(&resolver(&server), &client(), "_a.example.", RecordType::TXT).await;
    assert!(reply.metadata.truncation);
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn a_sandbox_with_many_queries_delays_only_itself() {
    let silent = TestServer::start(|query, _| match query.queries[0].name.to_ascii().starts_with("slow") {
        true => Vec::new(),
        false => with(query, 30, &[a(1)]),
    })
    .await;
    let resolver = resolver(&silent);
    let (greedy, other) = (client(), client());
    let names: Vec<String> = (0..100).map(|number| format!("slow{number}.example.")).collect();
    let mut slow: Vec<_> = names
        .iter()
        .map(|name| Box::pin(resolve(&resolver, &greedy, name, RecordType::A)))
        .collect();
    let mut last = Box::pin(resolve(&resolver, &greedy, "a.example.", RecordType::A));
    std::future::poll_fn(|context| {
        for query in &mut slow {
            assert!(query.as_mut().poll(context).is_pending());
        }
        assert!(last.as_mut().poll(context).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    assert_eq!(greedy.forwarded.available_permits(), 0);
    let reply = resolve(&resolver, &other, "a.example.", RecordType::A).await;
    assert_eq!(data(&reply), [a(1)]);
    // What is cancelled leaves nothing behind.
    drop(slow);
    assert_eq!(data(&last.await), [a(1)]);
    assert_eq!(greedy.forwarded.available_permits(), 32);
    assert_eq!(greedy.pending.available_permits(), 256);
}

#[tokio::test(start_paused = true)]
async fn the_rate_of_a_sandbox_is_limited() {
    let resolver = resolver_of(&[]);
    let (greedy, other) = (client(), client());
    for number in 0..250 {
        let reply = resolve(&resolver, &greedy, "table.example.", RecordType::A).await;
        let expected = if number < 200 {
            ResponseCode::NoError
        } else {
            ResponseCode::Refused
        };
        assert_eq!(reply.metadata.response_code, expected, "{number}");
    }
    let error = resolver.addresses("table.example", &greedy).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    assert_eq!(resolver.counters().limited, 51);
    assert!(resolver.addresses("table.example", &other).await.is_ok());
    advance(Duration::from_millis(10)).await;
    assert!(resolver.addresses("table.example", &greedy).await.is_ok());
}

#[tokio::test]
async fn pending_queries_are_limited() {
    let resolver = resolver_of(&[]);
    let client = client();
    let held = client.pending.try_acquire_many(256).unwrap();
    let reply = resolve(&resolver, &client, "table.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
    drop(held);
    let reply = resolve(&resolver, &client, "table.example.", RecordType::A).await;
    assert_eq!(data(&reply), [a(7)]);
}

#[tokio::test]
async fn servers_of_a_policy_are_asked_alone() {
    let operator = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let own = TestServer::at("127.0.0.3:0", |query, _| with(query, 30, &[a(66)])).await;
    let mut resolver = resolver(&operator);
    resolver.port = own.address.port();
    let policy = EgressPolicy {
        dns_servers: vec!["127.0.0.3".parse().unwrap()],
        ..EgressPolicy::default()
    };
    let (own_client, other) = (Client::new(Arc::new(policy), true), client());
    // A policy does not open what the operator closes.
    let reply = resolve(&resolver, &own_client, "a.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert_eq!((operator.count(), own.count()), (0, 0));
    resolver.allow_private = vec!["127.0.0.0/8".parse().unwrap()];
    resolver.deny = vec!["127.0.0.3".parse().unwrap()];
    let reply = resolve(&resolver, &own_client, "a.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    resolver.deny.clear();
    for _ in 0..2 {
        let reply = resolve(&resolver, &own_client, "a.example.", RecordType::A).await;
        assert_eq!(data(&reply), [a(66)]);
        let reply = resolve(&resolver, &other, "a.example.", RecordType::A).await;
        assert_eq!(data(&reply), [a(1)]);
    }
    assert_eq!((operator.count(), own.count()), (1, 1));
}
