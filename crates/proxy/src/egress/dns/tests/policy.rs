//! What a sandbox may resolve, and how much.

use super::*;

/// A client that may only resolve these domains.
fn client_of(domains: &[&str]) -> Client {
    let policy = EgressPolicy {
        deny: vec![Cidr::ALL],
        allow_domains: domains.iter().map(|domain| domain.parse().unwrap()).collect(),
        ..EgressPolicy::default()
    };
    Client::new(Arc::new(policy), true, 100)
}

#[tokio::test(start_paused = true)]
async fn names_outside_of_a_policy_are_refused() {
    let _clock = Clock::hold();
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

#[tokio::test(start_paused = true)]
async fn the_table_of_the_operator_answers() {
    let _clock = Clock::hold();
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

#[tokio::test(start_paused = true)]
async fn types_that_are_not_forwarded() {
    let _clock = Clock::hold();
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

#[tokio::test(start_paused = true)]
async fn other_types_are_forwarded() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| {
        let text = RData::TXT(TXT::new(vec!["x".repeat(200); 3]));
        with(query, 30, &[text])
    })
    .await;
    let reply = resolve(&resolver(&server), &client(), "_a.example.", RecordType::TXT).await;
    assert!(reply.metadata.truncation);
    assert_eq!(server.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_with_many_queries_delays_only_itself() {
    let _clock = Clock::hold();
    let silent = TestServer::start(|query, _| {
        if query.queries[0].name.to_ascii().starts_with("slow") {
            Vec::new()
        } else {
            with(query, 30, &[a(1)])
        }
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
    assert_eq!(greedy.pending.available_permits(), 1024);
}

/// The outcome of a query for the addresses of a name, by UDP.
async fn asked(resolver: &Resolver, client: &Client, name: &str) -> Option<ResponseCode> {
    let query = query(name, RecordType::A).to_vec().unwrap();
    let reply = resolver.answer(&query, Transport::Udp, client).await?;
    Some(Message::from_vec(&reply).unwrap().metadata.response_code)
}

/// What a future is now, without waiting.
async fn now<T>(mut future: std::pin::Pin<Box<impl Future<Output = T>>>) -> Option<T> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(outcome) => std::task::Poll::Ready(Some(outcome)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn what_is_known_is_always_answered() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = Client::new(Arc::default(), true, 1);
    assert_eq!(
        asked(&resolver, &client, "a.example.").await,
        Some(ResponseCode::NoError)
    );
    while client.rate.book(Duration::ZERO).is_some() {}
    let _held = client.pending.try_acquire_many(1024).unwrap();
    for name in ["a.example.", "table.example."] {
        for _ in 0..500 {
            let answer = now(Box::pin(asked(&resolver, &client, name))).await;
            assert_eq!(answer, Some(Some(ResponseCode::NoError)), "{name}");
        }
    }
    let closed = client_of(&[]);
    while closed.rate.book(Duration::ZERO).is_some() {}
    let refused = now(Box::pin(asked(&resolver, &closed, "b.example."))).await;
    assert_eq!(refused, Some(Some(ResponseCode::Refused)));
    assert_eq!(server.count(), 1);
    assert_eq!((resolver.counters().limited, resolver.counters().unanswered), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn queries_beyond_the_rate_wait() {
    let clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let (greedy, other) = (Client::new(Arc::default(), true, 10), client());
    let begun = Instant::now();
    let names: Vec<String> = (0..45).map(|number| format!("n{number}.example.")).collect();
    for name in &names {
        assert_eq!(
            clock.until(asked(&resolver, &greedy, name)).await,
            Some(ResponseCode::NoError),
            "{name}"
        );
    }
    // A burst of 40, and ten per second.
    assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
    let limited = resolver.counters().limited;
    assert!((1..=5).contains(&limited), "{limited}");
    assert_eq!(greedy.beyond.take(), (limited, 0));
    while greedy.rate.book(Duration::ZERO).is_some() {}
    // Others notice nothing.
    let answer = asked(&resolver, &other, "other.example.").await;
    assert_eq!((answer, other.beyond.take()), (Some(ResponseCode::NoError), (0, 0)));
    // Connections by name wait in the same way.
    let waits = resolver.addresses("waits.example", &greedy);
    assert!(clock.until(waits).await.is_ok());
    assert!(greedy.beyond.take().0 >= 1);
}

#[tokio::test(start_paused = true)]
async fn a_policy_applies_to_queries_that_wait() {
    let clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = Client::new(Arc::default(), true, 10);
    while client.rate.book(Duration::ZERO).is_some() {}
    let mut waiting = Box::pin(asked(&resolver, &client, "secret.example."));
    std::future::poll_fn(|context| {
        assert!(waiting.as_mut().poll(context).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    client.set_policy(client_of(&["other.example"]).policy());
    assert_eq!(clock.until(waiting).await, Some(ResponseCode::Refused));
    assert_eq!(server.count(), 0);
    // It waited, and there was a turn for it.
    assert_eq!(client.beyond.take(), (1, 0));
    assert_eq!((resolver.counters().refused, resolver.counters().unanswered), (1, 0));
    // Another sandbox may resolve the name.
    let answer = asked(&resolver, &self::client(), "secret.example.").await;
    assert_eq!(answer, Some(ResponseCode::NoError));
}

#[tokio::test(start_paused = true)]
async fn queries_that_would_wait_too_long_get_no_answer() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = Client::new(Arc::default(), true, 10);
    while client.rate.book(MAX_WAIT).is_some() {}
    // At once: nothing is held for them.
    assert_eq!(now(Box::pin(asked(&resolver, &client, "a.example."))).await, Some(None));
    let query = query("a.example.", RecordType::A).to_vec().unwrap();
    let reply = resolver.answer(&query, Transport::Tcp, &client).await.unwrap();
    let code = Message::from_vec(&reply).unwrap().metadata.response_code;
    assert_eq!(code, ResponseCode::ServFail);
    let error = resolver.addresses("a.example", &client).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    // The names of rules are not chosen by the sandbox.
    assert!(resolver.addresses_unlimited("b.example", &client).await.is_ok());
    assert_eq!((resolver.counters().unanswered, client.beyond.take()), (4, (0, 4)));
    assert_eq!(client.pending.available_permits(), 1024);
    assert!(client.flights.is_empty());
}

#[tokio::test]
async fn queries_that_wait_are_limited_in_number() {
    let silent = TestServer::start(|_, _| Vec::new()).await;
    let resolver = resolver(&silent);
    let client = Client::new(Arc::default(), true, 1000);
    let names: Vec<String> = (0..1100).map(|number| format!("n{number}.example.")).collect();
    let mut waiting = Vec::new();
    let mut unanswered = 0;
    for name in &names {
        // All of them begin in one turn of the test.
        let mut query = Box::pin(tokio::task::unconstrained(asked(&resolver, &client, name)));
        match std::future::poll_fn(|context| std::task::Poll::Ready(query.as_mut().poll(context))).await {
            std::task::Poll::Pending => waiting.push(query),
            std::task::Poll::Ready(outcome) => {
                assert_eq!(outcome, None);
                unanswered += 1;
            }
        }
    }
    assert_eq!((waiting.len(), unanswered), (1024, 76));
    assert_eq!((resolver.counters().unanswered, client.beyond.take()), (76, (0, 76)));
    // One for which the others leave no permit fails in time. It is not one too many.
    pause();
    advance(MAX_WAIT + Duration::from_secs(1)).await;
    assert_eq!(now(waiting.pop().unwrap()).await, Some(Some(ResponseCode::ServFail)));
    resume();
    assert_eq!((resolver.counters().unanswered, client.beyond.take()), (76, (0, 0)));
    let failed = Box::pin(resolver.addresses("failed.example", &client));
    pause();
    assert_eq!(failed.await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    resume();
    drop(waiting);
    assert_eq!(client.pending.available_permits(), 1024);
    assert!(client.flights.is_empty());
}

#[tokio::test(start_paused = true)]
async fn programs_that_ask_the_same_count_once() {
    let _clock = Clock::hold();
    let server = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let resolver = resolver(&server);
    let client = Client::new(Arc::default(), true, 1);
    let mut queries: Vec<_> = (0..200)
        .map(|_| Box::pin(asked(&resolver, &client, "a.example.")))
        .collect();
    std::future::poll_fn(|context| {
        for query in &mut queries {
            assert!(query.as_mut().poll(context).is_pending());
        }
        std::task::Poll::Ready(())
    })
    .await;
    for query in queries {
        assert_eq!(query.await, Some(ResponseCode::NoError));
    }
    assert_eq!((server.count(), client.beyond.take()), (1, (0, 0)));
    // One of a burst of four.
    assert_eq!(std::iter::from_fn(|| client.rate.book(Duration::ZERO)).count(), 3);
}

/// A client whose policy has this DNS server.
fn client_with_server(server: &str) -> Client {
    let policy = EgressPolicy {
        dns_servers: vec![server.parse().unwrap()],
        ..EgressPolicy::default()
    };
    Client::new(Arc::new(policy), true, 100)
}

#[tokio::test]
async fn servers_of_a_policy_delay_no_queries_to_others() {
    let operator = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let silent = TestServer::at("127.0.0.4:0", |_, _| Vec::new()).await;
    let mut resolver = resolver(&operator);
    resolver.port = silent.address.port();
    resolver.allow_private = vec!["127.0.0.0/8".parse().unwrap()];
    let owner = client_with_server("127.0.0.4");
    let mut waiting = Box::pin(asked(&resolver, &owner, "a.example."));
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("the server is silent"),
        () = silent.received.notified() => {}
    }
    let places = [&resolver.forwarded, &resolver.forwarded_elsewhere];
    assert_eq!(places.map(Semaphore::available_permits), [1024, 1023]);
    // Even if such queries have all places.
    let _held = resolver.forwarded_elsewhere.try_acquire_many(1023).unwrap();
    let answer = asked(&resolver, &client(), "a.example.").await;
    assert_eq!(answer, Some(ResponseCode::NoError));
    // A policy with the server of the operator shares queries with others, and so their places.
    let mut shared = resolver_of(&[silent.address]);
    shared.allow_private = resolver.allow_private.clone();
    shared.port = silent.address.port();
    let mut waiting = Box::pin(asked(&shared, &owner, "b.example."));
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("the server is silent"),
        () = silent.received.notified() => {}
    }
    let places = [&shared.forwarded, &shared.forwarded_elsewhere];
    assert_eq!(places.map(Semaphore::available_permits), [1023, 1024]);
}

#[tokio::test(start_paused = true)]
async fn queries_without_a_place_fail_in_time() {
    let mut resolver = resolver_of(&["127.0.0.1:9".parse().unwrap()]);
    resolver.allow_private = vec!["127.0.0.0/8".parse().unwrap()];
    for (places, client) in [
        (&resolver.forwarded, client()),
        (&resolver.forwarded_elsewhere, client_with_server("127.0.0.4")),
    ] {
        let _held = places.try_acquire_many(1024).unwrap();
        let begun = Instant::now();
        for _ in 0..2 {
            let answer = asked(&resolver, &client, "a.example.").await;
            assert_eq!(answer, Some(ResponseCode::ServFail));
        }
        // What was not asked is not kept.
        assert_eq!(begun.elapsed().as_secs(), 10);
        assert_eq!(client.beyond.take(), (0, 0));
    }
    let counters = DnsCounters {
        queries: 4,
        failed: 4,
        ..DnsCounters::default()
    };
    assert_eq!(resolver.counters(), counters);
}

#[tokio::test(start_paused = true)]
async fn servers_of_a_policy_are_asked_alone() {
    let _clock = Clock::hold();
    let operator = TestServer::start(|query, _| with(query, 30, &[a(1)])).await;
    let own = TestServer::at("127.0.0.3:0", |query, _| with(query, 30, &[a(66)])).await;
    let mut resolver = resolver(&operator);
    resolver.port = own.address.port();
    let (own_client, other) = (client_with_server("127.0.0.3"), client());
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
