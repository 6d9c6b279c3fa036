//! When a certificate is valid: the one field that the TLS library does not show.
//!
//! Reads the few DER elements in front of that field (RFC 5280, section 4.1) and nothing else. Whether the certificate
//! is sound is the business of its clients; here a malformed one only has no validity.

use jiff::Timestamp;
use jiff::civil;
use jiff::tz::TimeZone;
use rustls::pki_types::CertificateDer;

const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// `[0]`: the version.
const VERSION: u8 = 0xa0;

/// The validity of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// Its first second.
    pub not_before: Timestamp,
    /// Its last second.
    pub not_after: Timestamp,
}

impl Validity {
    /// The validity of a certificate; none if it cannot be parsed.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let mut outer = Reader(certificate);
        let mut certificate = Reader(outer.expect(SEQUENCE)?);
        let mut signed = Reader(certificate.expect(SEQUENCE)?);
        if signed.0.first() == Some(&VERSION) {
            signed.next()?;
        }
        signed.expect(INTEGER)?;
        // Algorithm and issuer.
        signed.expect(SEQUENCE)?;
        signed.expect(SEQUENCE)?;
        let mut validity = Reader(signed.expect(SEQUENCE)?);
        let mut next = || {
            let (tag, text) = validity.next()?;
            time(tag, text)
        };
        Some(Self {
            not_before: next()?,
            not_after: next()?,
        })
    }
}

/// The rest of a sequence of DER elements.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Tag and content of the next element.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&[tag, first], rest) = self.0.split_first_chunk()?;
        let (length, rest) = match first {
            ..=0x7f => (usize::from(first), rest),
            // More bytes would be a length that no certificate has.
            0x81..=0x83 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (bytes.iter().fold(0, |all, byte| all << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, content))
    }

    fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next()
            .filter(|(found, _)| *found == tag)
            .map(|(_, content)| content)
    }
}

/// A time in UTC with seconds, in either of the two forms that certificates have.
fn time(tag: u8, text: &[u8]) -> Option<Timestamp> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |from: usize, to: usize| -> Option<i16> {
        digits.get(from..to)?.iter().try_fold(0_i16, |all, digit| {
            digit.is_ascii_digit().then(|| all * 10 + i16::from(digit - b'0'))
        })
    };
    let (year, at) = match (tag, digits.len()) {
        // Years of two digits are 1950 to 2049.
        (UTC_TIME, 12) => (number(0, 2)? + if number(0, 2)? < 50 { 2000 } else { 1900 }, 2),
        (GENERALIZED_TIME, 14) => (number(0, 4)?, 4),
        _ => return None,
    };
    let field = |index: usize| i8::try_from(number(at + 2 * index, at + 2 * index + 2)?).ok();
    let time = civil::DateTime::new(year, field(0)?, field(1)?, field(2)?, field(3)?, field(4)?, 0);
    let zoned = time.ok()?.to_zoned(TimeZone::UTC).ok()?;
    Some(zoned.timestamp())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn certificate(from: i32, to: i32) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(["a.test".to_owned()]).expect("names");
        params.not_before = date_time_ymd(from, 2, 28);
        params.not_after = date_time_ymd(to, 12, 31);
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("a certificate").der().clone()
    }

    #[test]
    fn both_forms_of_times_are_read() {
        for (from, to) in [(1975, 2049), (2026, 2049), (2049, 2050), (2050, 4096)] {
            let validity = Validity::of(&certificate(from, to)).expect("valid");
            assert_eq!(validity.not_before.to_string(), format!("{from}-02-28T00:00:00Z"));
            assert_eq!(validity.not_after.to_string(), format!("{to}-12-31T00:00:00Z"));
        }
        let at = |tag, text: &str| time(tag, text.as_bytes()).map(|time| time.to_string());
        assert_eq!(at(UTC_TIME, "491231235959Z").as_deref(), Some("2049-12-31T23:59:59Z"));
        assert_eq!(at(UTC_TIME, "500101000000Z").as_deref(), Some("1950-01-01T00:00:00Z"));
        assert_eq!(
            at(GENERALIZED_TIME, "20500102030405Z").as_deref(),
            Some("2050-01-02T03:04:05Z")
        );
        for (tag, text) in [
            (UTC_TIME, "20500102030405Z"),
            (UTC_TIME, "4912312359Z"),
            (UTC_TIME, "491231235959"),
            (UTC_TIME, "491331235959Z"),
            (UTC_TIME, "4912312359+1Z"),
            (GENERALIZED_TIME, "491231235959Z"),
            (GENERALIZED_TIME, "20500102030405.5Z"),
            (SEQUENCE, "491231235959Z"),
        ] {
            assert_eq!(at(tag, text), None, "{text}");
        }
    }

    #[test]
    fn a_damaged_certificate_has_no_validity_and_does_no_harm() {
        let whole = certificate(2026, 2027);
        for length in 0..whole.len() {
            // Cut anywhere, the outermost length does not fit.
            assert_eq!(Validity::of(&CertificateDer::from(&whole[..length])), None, "{length}");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut damaged = whole.to_vec();
                damaged[at] ^= 1 << bit;
                let _ = Validity::of(&CertificateDer::from(damaged));
            }
        }
    }
}
