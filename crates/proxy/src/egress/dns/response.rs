//! Responses of DNS servers, reduced to what answers the question.
//!
//! Only records of the name that was asked and of the names that it is an alias for are kept, so a response says nothing
//! about other names. Addresses are not judged: an answer may contain private ones, which misleads no cache, and the gateway
//! judges every connection by its address. DNSSEC is not validated, and signatures are removed.

use std::time::Duration;

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use tokio::time::Instant;

use super::request::{HEADER, has_pointer_chain, question};

/// How long answers are kept, in seconds.
const POSITIVE: (u32, u32) = (1, 3600);

/// How long it is kept that there is no answer, in seconds (RFC 2308).
const NEGATIVE: (u32, u32) = (1, 300);

/// How long it is kept that there is no answer where the server does not say for how long (RFC 2308 section 5), in seconds:
/// so that a program which asks for a name again and again is no load for servers.
const NEGATIVE_UNKNOWN: u32 = 1;

/// How long it is kept that no server gave an answer, in seconds, so that a name that fails is not asked for with each
/// query (RFC 9520 section 3.2).
const FAILED: u32 = 1;

/// Records of a response. Names of many records can be made slow to read, and usual responses have fewer than 20.
const MAX_RECORDS: usize = 256;

/// Aliases that are followed. Usual names have at most four.
const MAX_ALIASES: usize = 16;

/// What a DNS server said.
#[derive(Debug)]
pub(super) struct ServerReply {
    pub(super) code: ResponseCode,
    pub(super) answers: Vec<Record>,
    pub(super) authorities: Vec<Record>,
}

/// Bytes from a DNS server.
#[derive(Debug)]
pub(super) enum Received {
    /// Not an answer to the query.
    Unrelated,
    /// The answer is too large for a datagram.
    Truncated,
    /// A response that is an answer to the query, with an error in it.
    Malformed,
    Reply(ServerReply),
}

/// Parses the response to a query with this id and question.
pub(super) fn receive(bytes: &[u8], id: u16, asked: &Query) -> Received {
    let Some(header) = bytes.first_chunk::<HEADER>() else {
        return Received::Unrelated;
    };
    let count = |at: usize| usize::from(u16::from_be_bytes([header[at], header[at + 1]]));
    let is_answer = header[..2] == id.to_be_bytes() && header[2] & 0xf8 == 0x80;
    if !is_answer || has_pointer_chain(bytes) {
        return Received::Unrelated;
    }
    let code = ResponseCode::from_low(header[3] & 0xf);
    if count(4) == 0 && !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
        // Servers that did not understand the query may not repeat it.
        let (answers, authorities) = (Vec::new(), Vec::new());
        return Received::Reply(ServerReply {
            code,
            answers,
            authorities,
        });
    }
    if count(4) != 1 || question(bytes).as_ref() != Some(asked) {
        return Received::Unrelated;
    }
    if header[2] & 2 != 0 {
        return Received::Truncated;
    }
    let records = || {
        if count(6) + count(8) > MAX_RECORDS {
            return None;
        }
        let mut decoder = BinDecoder::new(bytes);
        decoder.read_slice(HEADER).ok()?;
        Query::read(&mut decoder).ok()?;
        let mut section = |count| Message::read_records(&mut decoder, count, false, OpCode::Query).ok();
        Some((section(count(6))?.0, section(count(8))?.0))
    };
    match records() {
        Some((answers, authorities)) => Received::Reply(ServerReply {
            code,
            answers,
            authorities,
        }),
        None => Received::Malformed,
    }
}

/// A response to one question, with the time until which it is valid.
#[derive(Debug)]
pub(super) struct Response {
    /// The message as bytes, which need less memory than records.
    message: Box<[u8]>,
    received: Instant,
    /// Time to live of the response, in seconds.
    ttl: u32,
}

/// The records of a response.
#[derive(Debug)]
pub(super) struct Records {
    pub(super) code: ResponseCode,
    pub(super) answers: Vec<Record>,
    pub(super) authorities: Vec<Record>,
}

impl Response {
    /// Makes the response to a question of what a server replied.
    pub(super) fn new(asked: &Query, reply: ServerReply, now: Instant) -> Self {
        let mut answers = Vec::new();
        let (name, found) = take_answers(asked, reply.answers, &mut answers);
        let ttls = answers.iter().map(ttl);
        let mut authorities = Vec::new();
        let ttl = if found {
            ttls.min().unwrap_or_default().clamp(POSITIVE.0, POSITIVE.1)
        } else {
            let is_soa = |record: &Record| {
                let is_of_zone = record.name.zone_of(&name) && record.dns_class == DNSClass::IN;
                is_of_zone && record.record_type() == RecordType::SOA
            };
            authorities.extend(reply.authorities.into_iter().find(is_soa));
            let minimum = authorities.first().map(|record| match &record.data {
                RData::SOA(soa) => ttl(record).min(soa.minimum),
                _ => 0,
            });
            minimum.map_or(NEGATIVE_UNKNOWN, |minimum| {
                ttls.fold(minimum, u32::min).clamp(NEGATIVE.0, NEGATIVE.1)
            })
        };
        let mut message = Message::new(0, MessageType::Response, OpCode::Query);
        message.metadata.response_code = reply.code;
        message.answers = answers;
        message.authorities = authorities;
        match message.to_vec() {
            Ok(message) => Self {
                message: message.into(),
                received: now,
                ttl,
            },
            Err(_) => Self::failed(now),
        }
    }

    /// The response where no server has answered.
    pub(super) fn failed(now: Instant) -> Self {
        Self {
            message: Box::default(),
            received: now,
            ttl: FAILED,
        }
    }

    /// The response where the policy closes the name. It is for the one who asked, and is never kept.
    pub(super) fn refused(now: Instant) -> Self {
        let message = Message::error_msg(0, OpCode::Query, ResponseCode::Refused);
        Self {
            message: message.to_vec().unwrap_or_default().into(),
            received: now,
            ttl: 0,
        }
    }

    pub(super) fn is_valid(&self, now: Instant) -> bool {
        now.duration_since(self.received) < Duration::from_secs(self.ttl.into())
    }

    pub(super) fn size(&self) -> usize {
        self.message.len()
    }

    /// The records, with the time for which they are still valid.
    pub(super) fn records(&self, now: Instant) -> Records {
        let age = now.duration_since(self.received).as_secs();
        let left = self.ttl.saturating_sub(u32::try_from(age).unwrap_or(u32::MAX)).max(1);
        let message = Message::from_vec(&self.message);
        let mut message = message.unwrap_or_else(|_| Message::error_msg(0, OpCode::Query, ResponseCode::ServFail));
        for record in message.answers.iter_mut().chain(&mut message.authorities) {
            record.ttl = left;
        }
        Records {
            code: message.metadata.response_code,
            answers: message.answers,
            authorities: message.authorities,
        }
    }

    #[cfg(test)]
    pub(super) fn of_size(size: usize, ttl: u32, now: Instant) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self {
            message: vec![0; size].into(),
            received: now,
            ttl,
        })
    }
}

/// Moves the aliases of the name and the records that answer the question, in this order. Returns the last name and whether
/// it has records.
fn take_answers(asked: &Query, records: Vec<Record>, answers: &mut Vec<Record>) -> (Name, bool) {
    let mut name: Name = asked.name.clone();
    let of = |record: &Record, name: &Name, kind| {
        record.name == *name && record.record_type() == kind && record.dns_class == DNSClass::IN
    };
    while asked.query_type != RecordType::CNAME && answers.len() < MAX_ALIASES {
        let alias = records.iter().find(|record| of(record, &name, RecordType::CNAME));
        let Some(RData::CNAME(target)) = alias.map(|record| &record.data) else {
            break;
        };
        name = target.0.clone();
        answers.extend(alias.cloned());
    }
    let aliases = answers.len();
    answers.extend(records.into_iter().filter(|record| of(record, &name, asked.query_type)));
    (name, answers.len() > aliases)
}

/// The time to live of a record. Values with the upper bit are invalid and count as 0 (RFC 2181 section 8).
fn ttl(record: &Record) -> u32 {
    if record.ttl > u32::MAX >> 1 { 0 } else { record.ttl }
}
