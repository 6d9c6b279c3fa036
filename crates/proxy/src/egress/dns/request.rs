//! Queries of sandboxes, and the replies to them.

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Record};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder, BinEncodable, BinEncoder};

/// Length of the header of a message.
pub(super) const HEADER: usize = 12;

/// Longest query: usual ones have fewer than 100 bytes, and options for padding extend them to some hundred.
pub(crate) const MAX_QUERY: usize = 4 << 10;

/// Longest reply in a datagram without EDNS (RFC 1035 section 4.2.1).
const MIN_DATAGRAM: u16 = 512;

/// Longest reply in a datagram, which no usual network fragments. Announced to clients and servers.
pub(super) const MAX_DATAGRAM: u16 = 1232;

/// Length of the OPT record of a reply, which has no options.
const OPT: u16 = 11;

/// Pointers that may follow each other without a label between them. Encoders write at most one; many of them make every
/// name of a message slow to read.
const MAX_POINTERS: u8 = 3;

/// Records of a query, all of them in its last section: OPT and a signature.
const MAX_ADDITIONALS: u8 = 2;

/// How a query arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Udp,
    Tcp,
}

/// What a reply repeats of its query, and how large it may be.
#[derive(Debug)]
pub(super) struct Request {
    id: u16,
    op_code: OpCode,
    recursion_desired: bool,
    checking_disabled: bool,
    question: Option<Query>,
    edns: bool,
    limit: u16,
}

/// A query.
#[derive(Debug)]
pub(super) enum Parsed {
    /// One question of class IN, to be answered.
    Question(Request, Query),
    /// A query that is answered with an error.
    Invalid(Request, ResponseCode),
}

/// A query in its bytes. `None` if they are not one and a reply to them would be pointless or could go back and forth.
pub(super) fn parse(bytes: &[u8], transport: Transport) -> Option<Parsed> {
    let header: &[u8; HEADER] = bytes.first_chunk()?;
    let is_response = header[2] & 0x80 != 0;
    if is_response {
        return None;
    }
    let mut request = Request {
        id: u16::from_be_bytes([header[0], header[1]]),
        op_code: OpCode::from_u8(header[2] >> 3 & 0xf),
        recursion_desired: header[2] & 1 != 0,
        checking_disabled: header[3] & 0x10 != 0,
        question: None,
        edns: false,
        limit: match transport {
            Transport::Udp => MIN_DATAGRAM,
            Transport::Tcp => u16::MAX,
        },
    };
    if bytes.len() > MAX_QUERY || has_pointer_chain(bytes) {
        return Some(Parsed::Invalid(request, ResponseCode::FormErr));
    }
    let is_one_question = header[4..6] == [0, 1];
    if is_one_question {
        request.question = question(bytes);
    }
    if request.op_code != OpCode::Query {
        return Some(Parsed::Invalid(request, ResponseCode::NotImp));
    }
    let Some(question) = request.question.clone() else {
        return Some(Parsed::Invalid(request, ResponseCode::FormErr));
    };
    // Records are read before the rate of the sandbox is checked, so there must be few.
    let has_few_records = header[6..11] == [0; 5] && header[11] <= MAX_ADDITIONALS;
    let message = has_few_records.then(|| Message::from_vec(bytes).ok()).flatten();
    let Some(message) = message else {
        return Some(Parsed::Invalid(request, ResponseCode::FormErr));
    };
    if let Some(edns) = &message.edns {
        request.edns = true;
        if transport == Transport::Udp {
            request.limit = edns.max_payload().clamp(MIN_DATAGRAM, MAX_DATAGRAM);
        }
        if edns.version() != 0 {
            return Some(Parsed::Invalid(request, ResponseCode::BADVERS));
        }
    }
    if question.query_class != DNSClass::IN {
        return Some(Parsed::Invalid(request, ResponseCode::NotImp));
    }
    Some(Parsed::Question(request, question))
}

/// The first question of a message.
pub(super) fn question(bytes: &[u8]) -> Option<Query> {
    let mut decoder = BinDecoder::new(bytes);
    decoder.read_slice(HEADER).ok()?;
    Query::read(&mut decoder).ok()
}

/// Whether pointers to pointers could make the names of a message slow to read. Bytes that are not pointers may look like
/// some, but hardly like so many.
pub(super) fn has_pointer_chain(bytes: &[u8]) -> bool {
    let mut chains = vec![0u8; bytes.len()];
    for at in 1..bytes.len() {
        let pointer = u16::from_be_bytes([bytes[at - 1], bytes[at]]);
        let target = usize::from(pointer & 0x3fff);
        if pointer >= 0xc000 && target < at - 1 {
            chains[at - 1] = chains[target] + 1;
            if chains[at - 1] > MAX_POINTERS {
                return true;
            }
        }
    }
    false
}

impl Request {
    /// A reply without records.
    pub(super) fn error(&self, code: ResponseCode) -> Vec<u8> {
        self.reply(code, Vec::new(), Vec::new())
    }

    /// A reply. As many records as fit, and a mark that some are missing.
    pub(super) fn reply(&self, code: ResponseCode, answers: Vec<Record>, authorities: Vec<Record>) -> Vec<u8> {
        let mut message = Message::new(self.id, MessageType::Response, self.op_code);
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.recursion_available = true;
        message.metadata.checking_disabled = self.checking_disabled;
        message.metadata.response_code = code;
        message.queries.extend(self.question.clone());
        message.answers = answers;
        message.authorities = authorities;
        if let Some(bytes) = self.encode(&message) {
            return bytes;
        }
        // Records that can be read but not written.
        message.metadata.response_code = ResponseCode::ServFail;
        message.answers.clear();
        message.authorities.clear();
        self.encode(&message).unwrap_or_default()
    }

    fn encode(&self, message: &Message) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut encoder = BinEncoder::new(&mut bytes);
        encoder.set_max_size(if self.edns { self.limit - OPT } else { self.limit });
        message.emit(&mut encoder).ok()?;
        // Removes what is left of a record that did not fit.
        encoder.trim();
        if self.edns {
            // Root, type, size of datagrams, upper part of the response code, version, flags, length of the options.
            let [high, low] = MAX_DATAGRAM.to_be_bytes();
            let code = message.metadata.response_code.high();
            bytes.extend([0, 0, 41, high, low, code, 0, 0, 0, 0, 0]);
            bytes[HEADER - 2..HEADER].copy_from_slice(&[0, 1]);
        }
        Some(bytes)
    }
}
