//! The settings of traces and metrics: where they are sent, with which headers, and how many traces.

use std::fmt;

use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use rustls::pki_types::CertificateDer;

/// Where a receiver of OTLP over HTTP takes traces and metrics, below its address.
const TRACES: &str = "/v1/traces";
const METRICS: &str = "/v1/metrics";
/// Maximum number of headers, and of bytes of one.
const HEADERS_MAX: (usize, usize) = (32, 8192);
/// Headers that are those of the exchange.
const OWN: [HeaderName; 7] = [
    header::HOST,
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::CONTENT_ENCODING,
    header::TRANSFER_ENCODING,
    header::CONNECTION,
    header::USER_AGENT,
];

/// Settings of what is exported. Without a receiver, nothing is.
#[derive(Clone)]
pub struct TelemetrySettings {
    /// The receiver.
    pub endpoint: Endpoint,
    /// Headers of each export, such as the credential of the receiver.
    pub headers: HeaderMap,
    /// Issuers of its certificate that are trusted beside those of the host.
    pub authorities: Vec<CertificateDer<'static>>,
    /// The part of the traces that is recorded, from 0 to 1, of those that no client has decided about.
    pub sampling_ratio: f64,
}

impl fmt::Debug for TelemetrySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TelemetrySettings")
            .field("endpoint", &self.endpoint)
            .field("sampling_ratio", &self.sampling_ratio)
            .finish_non_exhaustive()
    }
}

/// The address of a receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub(super) is_tls: bool,
    /// A name, or an address without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// Host and port as they were given.
    pub(super) authority: HeaderValue,
    traces: Uri,
    metrics: Uri,
}

/// What is exported: a receiver takes each at a path of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signal {
    Traces,
    Metrics,
}

impl Endpoint {
    /// Reads the base address of a receiver, such as `http://127.0.0.1:4318`.
    ///
    /// # Errors
    /// When it is another URL, with what it must be.
    pub fn parse(text: &str) -> Result<Self, String> {
        // Of an address with a password, the error shows nothing.
        let why = || {
            "must be http:// or https:// and a host, with a port and a path if it has one, and nothing else, such as \
             http://127.0.0.1:4318"
                .to_owned()
        };
        let address: Uri = text.parse().map_err(|_| why())?;
        let is_tls = match address.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(why()),
        };
        let authority = address.authority().ok_or_else(why)?;
        let named = authority.host();
        let port = match authority.as_str().strip_prefix(named) {
            Some("") if is_tls => Some(443),
            Some("") => Some(80),
            Some(rest) => rest.strip_prefix(':').and_then(|port| port.parse::<u16>().ok()),
            // A user is before the host.
            None => None,
        };
        let port = port.filter(|port| *port > 0).ok_or_else(why)?;
        let host = named
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(named);
        let is_plain = address.query().is_none() && !text.contains(['#', '@']);
        if host.is_empty() || !is_plain {
            return Err(why());
        }
        let base = address.path().trim_end_matches('/');
        let below = |path: &str| -> Result<Uri, String> {
            let path = format!("{base}{path}").parse::<PathAndQuery>();
            Ok(path.map_err(|_| why())?.into())
        };
        Ok(Self {
            is_tls,
            host: host.to_owned(),
            port,
            authority: HeaderValue::from_str(authority.as_str()).map_err(|_| why())?,
            traces: below(TRACES)?,
            metrics: below(METRICS)?,
        })
    }

    /// Where exports of this kind are sent.
    pub(super) fn path(&self, signal: Signal) -> &Uri {
        match signal {
            Signal::Traces => &self.traces,
            Signal::Metrics => &self.metrics,
        }
    }

    /// Whether what is sent there can be read by others on the way: it is neither encrypted nor on this host.
    #[must_use]
    pub fn is_exposed(&self) -> bool {
        let address = self.host.parse::<std::net::IpAddr>();
        let is_local = address.map_or(self.host == "localhost", |address| address.is_loopback());
        !self.is_tls && !is_local
    }
}

/// Reads headers, one `Name: value` per line. Empty lines and those that begin with `#` are none.
///
/// # Errors
/// When a line is no header, or one of the exchange itself; the error names the line and shows nothing of it.
pub fn parse_headers(text: &str) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let (max, size) = HEADERS_MAX;
        if line.len() > size || headers.len() == max {
            return Err(format!(
                "line {number}: there may be {max} headers of {size} bytes each"
            ));
        }
        let header = line.split_once(':').and_then(|(name, value)| {
            let mut value = HeaderValue::from_str(value.trim()).ok()?;
            value.set_sensitive(true);
            Some((HeaderName::from_bytes(name.trim().as_bytes()).ok()?, value))
        });
        let Some((name, value)) = header else {
            return Err(format!("line {number} is no header: it must be Name: value"));
        };
        if OWN.contains(&name) {
            return Err(format!("line {number}: the header {name} is set by the platform"));
        }
        headers.append(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read() {
        for (text, is_tls, host, port, base) in [
            ("http://127.0.0.1:4318", false, "127.0.0.1", 4318, ""),
            ("http://127.0.0.1:4318/", false, "127.0.0.1", 4318, ""),
            ("http://[::1]:4318", false, "::1", 4318, ""),
            ("http://collector", false, "collector", 80, ""),
            ("https://otlp.test/api/x/", true, "otlp.test", 443, "/api/x"),
        ] {
            let endpoint = Endpoint::parse(text).unwrap();
            assert_eq!(
                (endpoint.is_tls, endpoint.host.as_str(), endpoint.port),
                (is_tls, host, port)
            );
            let paths = [Signal::Traces, Signal::Metrics].map(|signal| endpoint.path(signal).path().to_owned());
            assert_eq!(paths, [format!("{base}/v1/traces"), format!("{base}/v1/metrics")]);
        }
        for text in [
            "",
            "127.0.0.1:4318",
            "grpc://a:4317",
            "http://",
            "http://a:0",
            "http://a:99999",
            "http://a:",
            "http://a?b=c",
            "http://a/#b",
            "https://user:secret@a",
        ] {
            let why = Endpoint::parse(text).unwrap_err();
            assert!(
                why.contains("http://127.0.0.1:4318") && !why.contains("secret"),
                "{text}"
            );
        }
    }

    #[test]
    fn what_others_could_read_is_known() {
        for (text, is_exposed) in [
            ("http://127.9.9.9:4318", false),
            ("http://[::1]:4318", false),
            ("http://localhost:4318", false),
            ("https://collector.test", false),
            ("http://collector.test", true),
            ("http://10.0.0.1:4318", true),
        ] {
            assert_eq!(Endpoint::parse(text).unwrap().is_exposed(), is_exposed, "{text}");
        }
    }

    #[test]
    fn headers_are_lines() {
        let headers = parse_headers("# of the collector\n\nAuthorization: Bearer a:b\nx-tenant:7\n").unwrap();
        assert_eq!(headers.len(), 2);
        assert_eq!(headers["authorization"], "Bearer a:b");
        assert!(headers.values().all(HeaderValue::is_sensitive));
        assert!(!format!("{headers:?}").contains("Bearer"));
        for (text, line) in [
            ("x: 1\nsecret", "line 2"),
            ("x y: secret", "line 1"),
            ("x: secret\u{7f}", "line 1"),
            ("Host: secret", "line 1"),
            (&format!("x: {}secret", "a".repeat(8192)), "line 1"),
            (&"x: secret\n".repeat(33), "line 33"),
        ] {
            let why = parse_headers(text).unwrap_err();
            assert!(why.contains(line) && !why.contains("secret"), "{why}");
        }
    }
}
