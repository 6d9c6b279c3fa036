//! Messages at random. `PROPTEST_CASES` says how many.

use hickory_proto::op::Message;
use proptest::prelude::*;

use super::response::{Received, Response, receive};
use super::*;

fn labels() -> impl Strategy<Value = Vec<u8>> {
    let label = prop_oneof![
        "[a-zA-Z0-9_-]{1,12}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 1..64),
    ];
    prop::collection::vec(label, 0..5).prop_map(|labels| {
        let mut bytes: Vec<u8> = labels
            .iter()
            .flat_map(|label| [&[u8::try_from(label.len()).unwrap()][..], label].concat())
            .collect();
        bytes.push(0);
        bytes
    })
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => labels(),
        4 => Just(vec![0xc0, 12]),
        1 => (0u16..80).prop_map(|target| (0xc000 | target).to_be_bytes().to_vec()),
    ]
}

fn kind() -> impl Strategy<Value = u16> {
    prop_oneof![
        prop::sample::select(vec![
            1u16, 2, 5, 6, 12, 15, 16, 28, 33, 35, 39, 41, 46, 64, 65, 252, 255, 257
        ]),
        any::<u16>(),
    ]
}

fn record() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..24),
        prop::collection::vec(any::<u8>(), 4..=4),
        prop::collection::vec(any::<u8>(), 16..=16),
        name(),
        (any::<[u8; 2]>(), name()).prop_map(|(number, name)| [&number[..], &name].concat()),
        (name(), name(), any::<[u8; 20]>()).prop_map(|(one, other, numbers)| [&one[..], &other, &numbers].concat()),
    ];
    let class = prop_oneof![8 => Just(1u16), 1 => any::<u16>()];
    (name(), kind(), class, any::<u32>(), data).prop_map(|(name, kind, class, ttl, data)| {
        let mut bytes = name;
        bytes.extend(kind.to_be_bytes());
        bytes.extend(class.to_be_bytes());
        bytes.extend(ttl.to_be_bytes());
        bytes.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend(data);
        bytes
    })
}

/// A message with one question, whose sections have these numbers of records, and sometimes damage.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let flags = prop_oneof![Just([1, 0]), Just([0x81, 0x80]), any::<[u8; 2]>()];
    let sections = prop::collection::vec(prop::collection::vec(record(), 0..4), 3..=3);
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..2);
    (any::<u16>(), flags, labels(), kind(), sections, damage).prop_map(|(id, flags, name, kind, sections, damage)| {
        let mut bytes = id.to_be_bytes().to_vec();
        bytes.extend(flags);
        bytes.extend([0, 1]);
        for section in &sections {
            bytes.extend(u16::try_from(section.len()).unwrap().to_be_bytes());
        }
        bytes.extend(name);
        bytes.extend(kind.to_be_bytes());
        bytes.extend([0, 1]);
        bytes.extend(sections.concat().concat());
        for (at, to) in damage {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        bytes
    })
}

/// A message that is likely to be a response.
fn response() -> impl Strategy<Value = Vec<u8>> {
    message().prop_map(|mut bytes| {
        (bytes[2], bytes[3]) = (bytes[2] & 3 | 0x80, bytes[3] & 3);
        bytes
    })
}

fn check(query: &[u8], transport: Transport, client: &Client) -> Result<(), TestCaseError> {
    let mut resolver = Resolver::new(ResolverSettings::default());
    resolver.host_servers = HostServers::new("/nonexistent/resolv.conf");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let reply = runtime.block_on(resolver.answer(query, transport, client));
    let Some(reply) = reply else {
        prop_assert!(query.len() < 12 || query[2] & 0x80 != 0);
        return Ok(());
    };
    prop_assert_eq!(&reply[..2], &query[..2]);
    prop_assert!(transport == Transport::Tcp || reply.len() <= 1232);
    let message = Message::from_vec(&reply).unwrap();
    prop_assert_eq!(u8::from(message.metadata.op_code), query[2] >> 3 & 0xf);
    match request::question(query).filter(|_| query[4..6] == [0, 1]) {
        Some(question) if !request::has_pointer_chain(query) => {
            prop_assert_eq!(&message.queries, std::slice::from_ref(&question));
            prop_assert!(message.queries[0].name.eq_case(&question.name));
        }
        _ => prop_assert_eq!(message.metadata.response_code == ResponseCode::NoError, false),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_have_a_reply(bytes in prop::collection::vec(any::<u8>(), 0..100), tcp in any::<bool>()) {
        let transport = if tcp { Transport::Tcp } else { Transport::Udp };
        check(&bytes, transport, &Client::new(Arc::default(), true, 100))?;
    }

    #[test]
    fn queries_have_a_reply(bytes in message(), closed in any::<bool>()) {
        check(&bytes, Transport::Udp, &Client::new(Arc::default(), closed, 100))?;
    }

    #[test]
    fn responses_say_nothing_about_other_names(bytes in response(), same in any::<bool>(), age in 0u64..4000) {
        let Some(asked) = request::question(&bytes) else { return Ok(()) };
        let id = u16::from_be_bytes([bytes[0], bytes[1]]);
        let asked = if same { asked } else { Query::query(Name::root(), RecordType::A) };
        let Received::Reply(reply) = receive(&bytes, id, &asked) else { return Ok(()) };
        let now = Instant::now();
        let response = Response::new(&asked, reply, now);
        let records = response.records(now + std::time::Duration::from_secs(age));
        let mut name = asked.name.clone();
        for record in &records.answers {
            prop_assert_eq!(&record.name, &name);
            prop_assert!((1..=3600).contains(&record.ttl));
            if let (RData::CNAME(target), true) = (&record.data, asked.query_type != RecordType::CNAME) {
                name = target.0.clone();
            } else {
                prop_assert_eq!(record.record_type(), asked.query_type);
            }
        }
        prop_assert!(records.authorities.len() <= 1);
        for record in &records.authorities {
            prop_assert!(record.record_type() == RecordType::SOA && record.name.zone_of(&name));
            prop_assert!((1..=300).contains(&record.ttl));
        }
        let mut query = Message::query();
        query.add_query(asked.clone());
        for (transport, limit) in [(Transport::Udp, 512), (Transport::Tcp, 65535)] {
            let Some(Parsed::Question(request, _)) = request::parse(&query.to_vec().unwrap(), transport) else {
                return Ok(());
            };
            let reply = request.reply(records.code, records.answers.clone(), records.authorities.clone());
            prop_assert!(reply.len() <= limit);
            let reply = Message::from_vec(&reply).unwrap();
            prop_assert_eq!(&reply.queries, std::slice::from_ref(&asked));
            let is_complete = reply.answers == records.answers && reply.authorities == records.authorities;
            prop_assert_eq!(reply.metadata.truncation, !is_complete);
        }
    }

    #[test]
    fn names_are_the_same_as_text(text in "[a-zA-Z0-9_-]{1,9}(\\.[a-zA-Z0-9_-]{1,63}){0,4}\\.?") {
        if let Some(name) = domain_name(&text) {
            let labels = Name::from_labels(name.split('.').map(str::as_bytes)).unwrap();
            prop_assert_eq!(text_of(&labels), name);
        }
    }
}
