//! The resolver that answers the DNS queries of sandboxes.
//!
//! It forwards to DNS servers that resolve recursively, those of the operator, of the host or of a policy. Which names a
//! sandbox may resolve follows from its policy: if most addresses are closed to it, other queries are refused before
//! anything is sent, so that names are no way out. The resolver does not judge addresses in answers; the gateway judges
//! every connection.
//!
//! What the resolver can answer by itself costs no more than a refusal, so it is always answered. Questions for which DNS
//! servers have to be asked have a rate per sandbox ([`Client`]): beyond it they wait, and those for which there is no
//! place get no answer, as on a network that is too slow, because programs take a refusal as final and ask again after
//! silence. Servers that are slow are not the fault of the one who asks: what waits too long for them fails.
//!
//! Queries for HTTPS and SVCB records have no answer, so that connections need no keys for an encrypted ClientHello and
//! show their server name. DNSSEC is not validated, signatures are neither requested nor passed on. Names are forwarded in
//! lower case; answers are matched by a random id, a random port and the question.

mod cache;
mod client;
mod forward;
mod lru;
mod request;
mod response;
mod servers;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hickory_proto::op::{Query, ResponseCode};
use hickory_proto::rr::rdata::HINFO;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use model::network::{Cidr, domain_name};
use parking_lot::Mutex;
use protocol::node::DnsCounters;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub(super) use self::client::Client;
pub(super) use self::request::{MAX_QUERY, Transport};

use self::cache::{Cache, Flights, Key};
use self::client::NoTurn;
use self::request::{Parsed, Request};
use self::response::Response;
use self::servers::{HostServers, Ipv6Route, MAX_SERVERS};
use super::addresses::{Category, category};

/// Queries of all sandboxes that DNS servers are asked at a time, and as many for servers that only policies name. Each has
/// a socket. Further ones wait in the order of their arrival, and a sandbox has a small part of them.
const MAX_FORWARDED: usize = 1024;

/// How long a question may wait for its turn, and then for a place among those of all sandboxes: programs ask again after
/// five seconds, as a rule.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// How long answers from the table of the operator are valid, in seconds: it changes with a restart.
const HOSTS_TTL: u32 = 60;

/// The file with the DNS servers of the host.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// What the operator says about name resolution.
#[derive(Debug, Clone, Default)]
pub(super) struct ResolverSettings {
    /// DNS servers, in order of preference; if empty, those of the host. The first three are used.
    pub(super) servers: Vec<SocketAddr>,
    /// Addresses of names, which every sandbox may resolve.
    pub(super) hosts: BTreeMap<String, Vec<IpAddr>>,
    /// Networks in which the DNS servers of a policy may be although they are not public.
    pub(super) allow_private: Vec<Cidr>,
    /// Networks in which the DNS servers of a policy may not be.
    pub(super) deny: Vec<Cidr>,
}

#[derive(Debug, Default)]
struct Counters {
    queries: AtomicU64,
    cache_hits: AtomicU64,
    refused: AtomicU64,
    limited: AtomicU64,
    unanswered: AtomicU64,
    forwarded: AtomicU64,
    failed: AtomicU64,
}

/// What bounds a question that DNS servers have to be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    /// The rate of the sandbox, and the number of its datagrams that wait.
    Datagrams,
    /// The rate of the sandbox. Its connections bound how many wait.
    Connections,
    /// Nothing bounds the question, because the sandbox did not choose the name.
    None,
}

/// The resolver of all sandboxes of a node.
pub(super) struct Resolver {
    servers: Arc<[SocketAddr]>,
    host_servers: HostServers,
    hosts: BTreeMap<String, Vec<IpAddr>>,
    allow_private: Vec<Cidr>,
    deny: Vec<Cidr>,
    /// The port of the servers of a policy.
    port: u16,
    ipv6: Ipv6Route,
    cache: Mutex<Cache>,
    flights: Flights<Arc<Response>>,
    /// Places for queries to the servers of the operator or of the host.
    forwarded: Semaphore,
    /// Places for queries to servers that only policies name: those may be silent on purpose, and hold each place for long.
    forwarded_elsewhere: Semaphore,
    counters: Counters,
}

/// Records that answer a question.
#[derive(Debug, Default)]
struct Answer {
    code: ResponseCode,
    answers: Vec<Record>,
    authorities: Vec<Record>,
}

impl Answer {
    fn error(code: ResponseCode) -> Self {
        Self {
            code,
            ..Self::default()
        }
    }

    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.answers.iter().filter_map(|record| record.data.ip_addr())
    }
}

impl Resolver {
    pub(super) fn new(settings: ResolverSettings) -> Self {
        let hosts = settings.hosts.into_iter().map(|(name, addresses)| {
            let name = name.strip_suffix('.').unwrap_or(&name).to_ascii_lowercase();
            (name, addresses)
        });
        Self {
            servers: settings.servers.into_iter().take(MAX_SERVERS).collect(),
            host_servers: HostServers::new(RESOLV_CONF),
            hosts: hosts.collect(),
            allow_private: settings.allow_private,
            deny: settings.deny,
            port: servers::PORT,
            ipv6: Ipv6Route::default(),
            cache: Mutex::new(Cache::new()),
            flights: Flights::default(),
            forwarded: Semaphore::new(MAX_FORWARDED),
            forwarded_elsewhere: Semaphore::new(MAX_FORWARDED),
            counters: Counters::default(),
        }
    }

    /// How many queries there were so far.
    pub(super) fn counters(&self) -> DnsCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DnsCounters {
            queries: read(&self.counters.queries),
            cache_hits: read(&self.counters.cache_hits),
            refused: read(&self.counters.refused),
            limited: read(&self.counters.limited),
            unanswered: read(&self.counters.unanswered),
            forwarded: read(&self.counters.forwarded),
            failed: read(&self.counters.failed),
        }
    }

    /// Answers a message that a sandbox sent, without the length that TCP puts before it. `None` if it deserves no
    /// reply, or is a datagram beyond the limits. Takes some seconds if servers do not respond or the sandbox asks too
    /// much; a call that is cancelled leaves nothing behind.
    pub(super) async fn answer(
        &self,
        query: impl AsRef<[u8]>,
        transport: Transport,
        client: &Client,
    ) -> Option<Vec<u8>> {
        let parsed = request::parse(query.as_ref(), transport)?;
        // Its bytes, which may be many, do not wait with it.
        drop(query);
        count(&self.counters.queries);
        let (request, question) = match parsed {
            Parsed::Question(request, question) => (request, question),
            Parsed::Invalid(request, code) => return Some(request.error(code)),
        };
        let bound = match transport {
            Transport::Udp => Bound::Datagrams,
            Transport::Tcp => Bound::Connections,
        };
        let answer = match self.answer_question(&question, client, bound).await {
            Ok(answer) => answer,
            Err(NoTurn) if transport == Transport::Udp => return None,
            Err(NoTurn) => Answer::error(ResponseCode::ServFail),
        };
        if matches!(question.query_type, RecordType::A | RecordType::AAAA) {
            client.remember(answer.addresses(), &text_of(&question.name));
        }
        Some(reply(&request, answer))
    }

    /// Resolves the addresses of a name, for a connection to it. Not all of them are public.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a name, `PermissionDenied` if the sandbox may not resolve it, `QuotaExceeded` if it asks
    /// too much, `NotFound` if it has no address, `TimedOut` if no server answered.
    pub(super) async fn addresses(&self, name: &str, client: &Client) -> io::Result<Vec<IpAddr>> {
        let name = domain_name(name).ok_or(io::ErrorKind::InvalidInput)?;
        count(&self.counters.queries);
        self.addresses_of(&name, client, Bound::Connections).await
    }

    /// As [`Self::addresses`], for a name that the sandbox did not choose: its rate of queries does not count.
    pub(super) async fn addresses_unlimited(&self, name: &str, client: &Client) -> io::Result<Vec<IpAddr>> {
        let name = domain_name(name).ok_or(io::ErrorKind::InvalidInput)?;
        count(&self.counters.queries);
        self.addresses_of(&name, client, Bound::None).await
    }

    async fn addresses_of(&self, name: &str, client: &Client, bound: Bound) -> io::Result<Vec<IpAddr>> {
        let labels = name.split('.').map(str::as_bytes);
        let name = Name::from_labels(labels).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ask = |kind| {
            let question = Query::query(name.clone(), kind);
            async move { self.answer_question(&question, client, bound).await }
        };
        let both = Box::pin(async { tokio::join!(ask(RecordType::A), ask(RecordType::AAAA)) }).await;
        let answers: Vec<_> = [both.0, both.1].into_iter().flatten().collect();
        let addresses: Vec<_> = answers.iter().flat_map(Answer::addresses).collect();
        let failed = |code| answers.iter().any(|answer| answer.code == code);
        if !addresses.is_empty() {
            Ok(addresses)
        } else if answers.len() < 2 {
            Err(io::ErrorKind::QuotaExceeded.into())
        } else if failed(ResponseCode::Refused) {
            Err(io::ErrorKind::PermissionDenied.into())
        } else if failed(ResponseCode::ServFail) {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    async fn answer_question(&self, question: &Query, client: &Client, bound: Bound) -> Result<Answer, NoTurn> {
        let name = domain_name(&text_of(&question.name));
        let kind = question.query_type;
        if let Some(addresses) = name.as_ref().and_then(|name| self.hosts.get(name)) {
            return Ok(Answer {
                answers: from_hosts(question, addresses),
                ..Answer::default()
            });
        }
        if !client.may_resolve(name.as_deref()) {
            count(&self.counters.refused);
            return Ok(Answer::error(ResponseCode::Refused));
        }
        match (kind, u16::from(kind)) {
            (RecordType::HTTPS | RecordType::SVCB, _) => return Ok(Answer::default()),
            (RecordType::AAAA, _) if !self.ipv6.has_ipv6() => return Ok(Answer::default()),
            (RecordType::ANY, _) => {
                // RFC 8482 section 4.2.
                let data = HINFO::new("RFC8482".to_owned(), String::new());
                let record = Record::from_rdata(question.name.clone(), HOSTS_TTL, RData::HINFO(data));
                return Ok(Answer {
                    answers: vec![record],
                    ..Answer::default()
                });
            }
            (RecordType::AXFR | RecordType::IXFR, _) => return Ok(Answer::error(ResponseCode::Refused)),
            // Not a type of records: OPT, and those for transactions (RFC 6895 section 3.1).
            (_, 0 | 41 | 128..=255) => return Ok(Answer::error(ResponseCode::NotImp)),
            _ => {}
        }
        let response = self.look_up(question, client, bound).await?;
        let records = response.records(Instant::now());
        let mut answers = records.answers;
        // Names in the case of the question, as clients expect it.
        for record in answers.iter_mut().filter(|record| record.name == question.name) {
            record.name = question.name.clone();
        }
        Ok(Answer {
            code: records.code,
            answers,
            authorities: records.authorities,
        })
    }

    /// The response to a question, from the cache or from servers.
    async fn look_up(&self, question: &Query, client: &Client, bound: Bound) -> Result<Arc<Response>, NoTurn> {
        let servers = self.servers_of(client);
        if servers.is_empty() {
            tracing::debug!("no DNS server");
            return Ok(Arc::new(Response::failed(Instant::now())));
        }
        let question = Query::query(question.name.to_lowercase(), question.query_type);
        let key = Key {
            servers,
            question: Arc::new(question),
        };
        if let Some(response) = self.cached(&key) {
            return Ok(response);
        }
        let response = match bound {
            Bound::None => {
                let _permit = client.forwarded.acquire().await;
                Ok(Box::pin(self.flights.join(&key, self.forward(&key))).await)
            }
            Bound::Datagrams | Bound::Connections => self.in_turn(&key, client, bound).await,
        };
        response.inspect_err(|NoTurn| {
            count(&self.counters.unanswered);
            client.beyond.count_unanswered();
        })
    }

    /// The response to a question of a sandbox, when it is its turn. An error if there is no place for it, or its turn would
    /// come too late. Programs of a sandbox that ask the same count as one.
    async fn in_turn(&self, key: &Key, client: &Client, bound: Bound) -> Result<Arc<Response>, NoTurn> {
        let _place = match bound {
            Bound::Datagrams => Some(client.pending.try_acquire().map_err(|_| NoTurn)?),
            Bound::Connections | Bound::None => None,
        };
        let ask = async {
            let latest = Instant::now() + MAX_WAIT;
            let wait = client.rate.book(MAX_WAIT).ok_or(NoTurn)?;
            if !wait.is_zero() {
                count(&self.counters.limited);
                client.beyond.count_waited();
                sleep(wait).await;
            }
            // Before another sandbox may wait for this query: what a sandbox has too many of delays only itself.
            let Ok(_permit) = timeout_at(latest, client.forwarded.acquire()).await else {
                // Its other queries take long, which says nothing about how many there are.
                return Ok(self.failure());
            };
            // A policy that was set meanwhile applies at once: a name that it closes must not leave.
            let name = domain_name(&text_of(&key.question.name));
            if !client.may_resolve(name.as_deref()) || self.servers_of(client) != key.servers {
                count(&self.counters.refused);
                return Ok(Arc::new(Response::refused(Instant::now())));
            }
            Ok(self.flights.join(key, self.forward(key)).await)
        };
        Box::pin(client.flights.join(key, ask)).await
    }

    fn cached(&self, key: &Key) -> Option<Arc<Response>> {
        let response = self.cache.lock().get(key, Instant::now())?;
        count(&self.counters.cache_hits);
        Some(response)
    }

    async fn forward(&self, key: &Key) -> Arc<Response> {
        // Another sandbox may have asked in the meantime.
        if let Some(response) = self.cached(key) {
            return response;
        }
        let Ok(_permit) = timeout(MAX_WAIT, self.places(&key.servers).acquire()).await else {
            tracing::debug!("too many queries wait for DNS servers");
            // The cache does not get it: no server was asked, and there may be a place for the next query.
            return self.failure();
        };
        count(&self.counters.forwarded);
        let response = match forward::ask(&key.servers, &key.question).await {
            Some(reply) => Arc::new(Response::new(&key.question, reply, Instant::now())),
            None => self.failure(),
        };
        self.cache.lock().insert(key.clone(), response.clone(), Instant::now());
        response
    }

    fn failure(&self) -> Arc<Response> {
        count(&self.counters.failed);
        Arc::new(Response::failed(Instant::now()))
    }

    /// The places for queries to these servers. Policies with the servers of the operator have places among those of all,
    /// because they also share the queries themselves.
    fn places(&self, servers: &Arc<[SocketAddr]>) -> &Semaphore {
        if *servers == self.common_servers() {
            &self.forwarded
        } else {
            &self.forwarded_elsewhere
        }
    }

    /// The servers that answer a sandbox. Those of its policy only if it could reach them itself: public ones, or in
    /// networks that the operator opened.
    fn servers_of(&self, client: &Client) -> Arc<[SocketAddr]> {
        let policy = client.policy();
        if !policy.dns_servers.is_empty() {
            let contains = |networks: &[Cidr], address| networks.iter().any(|network| network.contains(address));
            let is_open = |address: &IpAddr| {
                let is_allowed = category(*address) == Category::Public || contains(&self.allow_private, *address);
                is_allowed && !contains(&self.deny, *address)
            };
            let servers = policy
                .dns_servers
                .iter()
                .map(|address| IpAddr::V4(*address))
                .filter(is_open);
            return servers
                .take(MAX_SERVERS)
                .map(|address| SocketAddr::new(address, self.port))
                .collect();
        }
        self.common_servers()
    }

    /// The servers that answer sandboxes whose policies name none.
    fn common_servers(&self) -> Arc<[SocketAddr]> {
        if self.servers.is_empty() {
            self.host_servers.current()
        } else {
            self.servers.clone()
        }
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver")
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

fn reply(request: &Request, answer: Answer) -> Vec<u8> {
    request.reply(answer.code, answer.answers, answer.authorities)
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A name without a dot at the end. Bytes that are unusual in names are escaped.
fn text_of(name: &Name) -> String {
    let mut text = name.to_lowercase().to_ascii();
    if text.ends_with('.') {
        text.pop();
    }
    text
}

fn from_hosts(question: &Query, addresses: &[IpAddr]) -> Vec<Record> {
    let record = |address: &IpAddr| {
        let data = match (question.query_type, address) {
            (RecordType::A, IpAddr::V4(address)) => RData::A((*address).into()),
            (RecordType::AAAA, IpAddr::V6(address)) => RData::AAAA((*address).into()),
            _ => return None,
        };
        Some(Record::from_rdata(question.name.clone(), HOSTS_TTL, data))
    };
    addresses.iter().filter_map(record).collect()
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
