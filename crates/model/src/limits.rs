//! Limits of the API, each with its origin.

/// Default timeout of `POST /sandboxes`, in seconds (API contract).
pub const DEFAULT_TIMEOUT_V1_S: u32 = 15;
/// Maximum number of sandboxes that one fork creates.
pub const FORKS_MAX: u32 = 100;
/// Default timeout of `POST /v2/sandboxes` and of the v2 path to connect, in seconds (documented by the SDKs that call
/// those paths).
pub const DEFAULT_TIMEOUT_V2_S: u32 = 300;
/// Shortest effective `duration` of a refresh, in seconds; smaller or missing values are raised to it.
pub const REFRESH_FLOOR_S: u32 = 15;
/// Longest `duration` of a refresh, in seconds (API contract).
pub const REFRESH_MAX_S: u32 = 3600;
/// Smallest and largest page size of a list (API contract).
pub const LIST_LIMIT: std::ops::RangeInclusive<u32> = 1..=100;
/// Maximum number of `injections` and of `resources` in a create request (API contract).
pub const ATTACHMENTS_MAX: usize = 20;
/// Maximum number of entries in `allowOut` and in `denyOut`: a policy is evaluated for every connection, entry by entry.
pub const EGRESS_ENTRIES_MAX: usize = 256;
/// Maximum length of an entry of `allowOut` or `denyOut`, in characters: a domain name of 253, with a dot at the end.
pub const EGRESS_ENTRY_MAX: usize = 254;
/// Maximum number of `dnsServers` (documented by the SDKs).
pub const DNS_SERVERS_MAX: usize = 10;
/// Maximum length of an entry of `dnsServers`, in characters: an IPv4 address.
pub const DNS_SERVER_MAX: usize = 15;
/// Maximum length of `maskRequestHost`, in characters. The longest domain name has 253.
pub const HOST_MASK_MAX: usize = 255;
/// Maximum number of ports in the list of those whose servers speak TLS.
pub const HTTPS_PORTS_MAX: usize = 128;
/// Maximum length of the address of an egress proxy, in bytes.
pub const PROXY_ADDRESS_MAX: usize = 255;
/// Maximum length of a user or a password for an egress proxy, in bytes (RFC 1929 section 2).
pub const PROXY_CREDENTIAL_MAX: usize = 255;
/// Maximum length of the name in the certificate of an egress proxy, in characters: that of a domain name.
pub const PROXY_SERVER_NAME_MAX: usize = 253;
/// Maximum length of the certificates of an egress proxy, in bytes.
pub const PROXY_CA_MAX: usize = 8192;
/// Maximum number of `headers`, of `if_headers` and of `if_queries` of an injection rule (API contract).
pub const INJECTION_ENTRIES_MAX: usize = 20;
/// Maximum size of all injections of a sandbox together, in bytes of JSON.
pub const INJECTIONS_BYTES_MAX: usize = 128 * 1024;
/// Maximum number of saved injection rules of a user.
pub const INJECTION_RULES_MAX: u32 = 1000;
/// Maximum length of the name of a header in a rule, in bytes.
pub const HEADER_NAME_MAX: usize = 256;
/// Maximum length of the value of a header in a rule, in bytes, which upstreams accept: their limits for all headers
/// together begin at 8 KiB.
pub const HEADER_VALUE_MAX: usize = 8192;
/// Maximum length of the `base_url` of an injection rule, in bytes.
pub const BASE_URL_MAX: usize = 2048;
/// Largest body of an API request, in bytes (16 MiB, what the existing platform accepts).
pub const BODY_MAX_BYTES: usize = 16 * 1024 * 1024;
/// Default maximum lifetime of a sandbox from its start, in seconds (24 h).
pub const DEFAULT_MAX_LIFETIME_S: u32 = 24 * 3600;
/// Maximum length of the name of a team, key or token, in characters, for tables and logs.
pub const NAME_MAX: usize = 64;

/// Whether a text is a valid name of a team, key or token: 1 to [`NAME_MAX`] characters, without control characters and
/// without leading or trailing spaces.
#[must_use]
pub fn is_name(text: &str) -> bool {
    (1..=NAME_MAX).contains(&text.chars().count()) && !text.chars().any(char::is_control) && text.trim() == text
}

/// Default retention of the log of a sandbox after its end, in seconds (API contract).
pub const DEFAULT_LOG_RETENTION_S: u32 = 7 * 24 * 3600;

/// Default maximum number of entries in the log of a sandbox. Also the maximum of one response.
pub const DEFAULT_LOG_ENTRIES: u32 = 10_000;

/// Default retention of metrics samples, in seconds: as long as the default maximum lifetime of a sandbox.
pub const DEFAULT_METRIC_RETENTION_S: u32 = 24 * 3600;
