//! Certificates in PEM: read strictly where they come from the host, leniently where an image has them.
//!
//! No certificate is verified or understood here. What is checked is that each is one, as far as its outer form goes,
//! because a trust store with one broken entry makes some programs drop all of it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use protocol::agent::CA_BUNDLE_MAX;

/// The longest bundle that is taken, in bytes: some 30 certificates, that of the gateway and those of an operator.
pub(crate) const LIMIT: usize = CA_BUNDLE_MAX;
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
/// Characters of a line of base64, as is usual.
const LINE: usize = 64;

/// Certificates that were checked, each as PEM text of one form, in their order and without repetition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bundle(Vec<String>);

/// Why a text is not a bundle.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadBundle {
    #[error("it is longer than {LIMIT} bytes")]
    TooLong,
    #[error("it has no certificate in PEM")]
    Empty,
    #[error("it has a PEM block '{0}': only certificates belong here")]
    OtherBlock(String),
    #[error("the PEM block of certificate {0} has no end")]
    Unfinished(usize),
    #[error("certificate {0} is not base64 of one DER certificate")]
    Malformed(usize),
}

impl Bundle {
    /// Reads a bundle of at least one certificate. Text between the blocks is left out.
    ///
    /// # Errors
    /// [`BadBundle`]; certificates are counted from 1.
    pub(crate) fn parse(text: &str) -> Result<Self, BadBundle> {
        if text.len() > LIMIT {
            return Err(BadBundle::TooLong);
        }
        let mut certificates = Vec::new();
        let mut lines = text.lines().map(str::trim);
        while let Some(line) = lines.next() {
            let number = certificates.len() + 1;
            if line != BEGIN {
                match line.strip_prefix("-----BEGIN ") {
                    Some(label) => return Err(BadBundle::OtherBlock(label.trim_end_matches('-').to_owned())),
                    None => continue,
                }
            }
            let mut encoded = String::new();
            loop {
                match lines.next() {
                    Some(END) => break,
                    Some(line) => encoded.push_str(line),
                    None => return Err(BadBundle::Unfinished(number)),
                }
            }
            certificates.push(normal(&encoded).ok_or(BadBundle::Malformed(number))?);
        }
        Self::new(certificates).ok_or(BadBundle::Empty)
    }

    /// The certificates in a file of any content; what is not a certificate is left out.
    pub(crate) fn find(text: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(text);
        let blocks = text.split(BEGIN).skip(1);
        let encoded = blocks.filter_map(|block| block.split_once(END).map(|(encoded, _)| encoded));
        let normalized = encoded.filter_map(|encoded| normal(&encoded.split_whitespace().collect::<String>()));
        Self::new(normalized.collect())
    }

    fn new(certificates: Vec<String>) -> Option<Self> {
        let mut seen = std::collections::HashSet::new();
        let unique: Vec<String> = certificates
            .into_iter()
            .filter(|certificate| seen.insert(certificate.clone()))
            .collect();
        (!unique.is_empty()).then_some(Self(unique))
    }

    /// The certificates, each as PEM text that ends in a line break.
    pub(crate) fn certificates(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Whether the bundle has a certificate.
    pub(super) fn has(&self, certificate: &str) -> bool {
        self.0.iter().any(|own| own == certificate)
    }

    /// The certificates in DER.
    pub(crate) fn ders(&self) -> Vec<Vec<u8>> {
        ders(&self.0)
    }

    /// The bundle as one PEM text.
    pub(crate) fn text(&self) -> String {
        self.0.concat()
    }
}

/// Certificates in DER of texts in the one form.
pub(super) fn ders(certificates: &[String]) -> Vec<Vec<u8>> {
    let encoded = certificates.iter().map(|certificate| {
        let lines = certificate.lines().filter(|line| !line.starts_with('-'));
        STANDARD.decode(lines.collect::<String>())
    });
    encoded.map(|der| der.expect("it was checked")).collect()
}

/// A certificate's PEM text in the one form.
fn normal(encoded: &str) -> Option<String> {
    let der = STANDARD.decode(encoded).ok()?;
    if !is_certificate(&der) {
        return None;
    }
    let encoded = STANDARD.encode(der);
    let mut out = format!("{BEGIN}\n");
    let mut rest = encoded.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(LINE));
        out.push_str(line);
        out.push('\n');
        rest = after;
    }
    out.push_str(END);
    out.push('\n');
    Some(out)
}

/// Whether these bytes have the outer form of a certificate: what is signed, the algorithm, and the signature.
fn is_certificate(der: &[u8]) -> bool {
    const SEQUENCE: u8 = 0x30;
    const BIT_STRING: u8 = 0x03;
    let parts = || {
        let (body, rest) = element(der, SEQUENCE)?;
        let (signed, after) = element(body, SEQUENCE)?;
        let (_, after) = element(after, SEQUENCE)?;
        let (signature, after) = element(after, BIT_STRING)?;
        Some(rest.is_empty() && after.is_empty() && !signed.is_empty() && !signature.is_empty())
    };
    parts().unwrap_or(false)
}

/// The content of the DER element at the beginning, which must have this tag, and what follows it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&[found, first], rest) = der.split_first_chunk::<2>()?;
    if found != tag {
        return None;
    }
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // More than three bytes would be more than any limit here.
        0x81..=0x83 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            let length = bytes.iter().fold(0, |length, byte| (length << 8) | usize::from(*byte));
            (length, rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What has the form of a certificate, told apart by a number.
    pub(crate) fn certificate(number: u8) -> String {
        let der = [
            0x30, 0x0b, 0x30, 0x03, 0x02, 0x01, number, 0x30, 0x00, 0x03, 0x02, 0x00, 0x01,
        ];
        format!("{BEGIN}\n{}\n{END}\n", STANDARD.encode(der))
    }

    #[test]
    fn bundles_are_brought_into_one_form() {
        let (one, two) = (certificate(1), certificate(2));
        let text = format!("# comment\r\n{}{two}\n{one}", one.replace('\n', "\r\n"));
        let bundle = Bundle::parse(&text).unwrap();
        assert_eq!(bundle.text(), format!("{one}{two}"));
        assert_eq!(Bundle::parse(&bundle.text()).unwrap(), bundle);
        let long = STANDARD.encode(
            [
                [0x30, 0x81, 0x88].as_slice(),
                &[0x30, 0x81, 0x80],
                &[7; 0x80],
                &[0x30, 0, 3, 1, 0],
            ]
            .concat(),
        );
        let bundle = Bundle::parse(&format!("{BEGIN}\n{long}\n{END}")).unwrap();
        assert!(bundle.text().lines().all(|line| line.len() <= LINE));
    }

    #[test]
    fn what_is_no_bundle() {
        let one = certificate(1);
        let check = |text: &str, expect: BadBundle| assert_eq!(Bundle::parse(text), Err(expect), "{text:.80}");
        check("", BadBundle::Empty);
        check("MAsw", BadBundle::Empty);
        check(
            &one.replace("CERTIFICATE", "PRIVATE KEY"),
            BadBundle::OtherBlock("PRIVATE KEY".to_owned()),
        );
        check(
            &format!("{one}{}", one.replace("CERTIFICATE", "TRUSTED CERTIFICATE")),
            BadBundle::OtherBlock("TRUSTED CERTIFICATE".to_owned()),
        );
        check(one.trim_end().trim_end_matches('-'), BadBundle::Unfinished(1));
        check(&format!("{one}{BEGIN}\n!\n{END}\n"), BadBundle::Malformed(2));
        for der in [
            [].as_slice(),
            &[0x30],
            &[0x30, 0x00],
            &[0x30, 0x84, 0, 0, 0, 1, 0],
            &[0x30, 0x01, 0x30],
            &[0x31, 0x00],
        ] {
            check(
                &format!("{BEGIN}\n{}\n{END}\n", STANDARD.encode(der)),
                BadBundle::Malformed(1),
            );
        }
        let padded = |length: usize| format!("{one}{}", " ".repeat(length - one.len()));
        assert!(Bundle::parse(&padded(LIMIT)).is_ok());
        check(&padded(LIMIT + 1), BadBundle::TooLong);
    }

    #[test]
    fn certificates_are_found_in_anything() {
        let (one, two) = (certificate(1), certificate(2));
        let text = format!("root:x:0\n{one}\u{fffd}{BEGIN}\nsecret\n{END}\n{two}{BEGIN}\nAAAA");
        let found = Bundle::find(&[text.as_bytes(), b"\xff"].concat()).unwrap();
        assert_eq!(found.text(), format!("{one}{two}"));
        assert_eq!(Bundle::find(b"root:x:0:0::/root:/bin/sh\n"), None);
    }
}
