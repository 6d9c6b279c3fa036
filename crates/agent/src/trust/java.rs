//! Java's store of trusted certificates, as Debian, Ubuntu, Alpine and Fedora have it for all their Java programs.
//!
//! Java knows no variable for further certificates that does not make it print a line. The stores of distributions have
//! the format JKS, a list of entries and a digest; stores of other formats, which vendors ship with their own Java, are
//! left alone.

use sha1::{Digest as _, Sha1};

/// Paths of the trust store in distributions.
pub(super) const STORES: [&str; 2] = ["etc/ssl/certs/java/cacerts", "etc/pki/ca-trust/extracted/java/cacerts"];
/// How the names of our entries begin.
const ALIAS: &[u8] = b"ringfence-egress-gateway-";
const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
const TRUSTED: u32 = 2;
const KIND: &[u8] = b"X.509";
/// What the digest begins with: the password that all these stores have, in UTF-16, and a text of the format.
const SALT: &[u8] = b"\0c\0h\0a\0n\0g\0e\0i\0tMighty Aphrodite";
const DIGEST: usize = 20;

/// A store with these certificates instead of those that were added to it before; none if it is not one that can be
/// extended.
pub(super) fn extend(store: &[u8], certificates: &[Vec<u8>]) -> Option<Vec<u8>> {
    let (content, digest) = store.split_at_checked(store.len().checked_sub(DIGEST)?)?;
    if sum(content) != digest {
        return None;
    }
    let mut rest = content;
    if (number(&mut rest)?, number(&mut rest)?) != (MAGIC, VERSION) {
        return None;
    }
    let count = number(&mut rest)?;
    let mut entries = Vec::with_capacity(store.len());
    let mut kept: u32 = 0;
    for _ in 0..count {
        let entry = rest;
        // Entries of other kinds have private keys, which is not what this store is for.
        if number(&mut rest)? != TRUSTED {
            return None;
        }
        let is_ours = text(&mut rest)?.starts_with(ALIAS);
        take(&mut rest, 8)?;
        text(&mut rest)?;
        let length = number(&mut rest)?;
        take(&mut rest, usize::try_from(length).ok()?)?;
        if !is_ours {
            entries.extend_from_slice(&entry[..entry.len() - rest.len()]);
            kept += 1;
        }
    }
    if !rest.is_empty() {
        return None;
    }
    for (index, certificate) in certificates.iter().enumerate() {
        entries.extend(TRUSTED.to_be_bytes());
        put(&mut entries, &[ALIAS, index.to_string().as_bytes()].concat())?;
        // When it was added: nobody asks.
        entries.extend([0; 8]);
        put(&mut entries, KIND)?;
        entries.extend(u32::try_from(certificate.len()).ok()?.to_be_bytes());
        entries.extend_from_slice(certificate);
    }
    let count = kept.checked_add(u32::try_from(certificates.len()).ok()?)?;
    let head = [MAGIC, VERSION, count].map(u32::to_be_bytes).concat();
    let mut extended = [head, entries].concat();
    let digest = sum(&extended);
    extended.extend(digest);
    Some(extended)
}

fn sum(content: &[u8]) -> [u8; DIGEST] {
    Sha1::new().chain_update(SALT).chain_update(content).finalize().into()
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(taken)
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    let bytes = take(rest, 4)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = take(rest, 2)?;
    take(rest, usize::from(u16::from_be_bytes(length.try_into().ok()?)))
}

fn put(to: &mut Vec<u8>, text: &[u8]) -> Option<()> {
    to.extend(u16::try_from(text.len()).ok()?.to_be_bytes());
    to.extend_from_slice(text);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(aliases: &[&[u8]]) -> Vec<u8> {
        let count = u32::try_from(aliases.len()).unwrap();
        let mut store = [MAGIC, VERSION, count].map(u32::to_be_bytes).concat();
        for alias in aliases {
            store.extend(TRUSTED.to_be_bytes());
            put(&mut store, alias).unwrap();
            store.extend([1; 8]);
            put(&mut store, KIND).unwrap();
            store.extend(3u32.to_be_bytes());
            store.extend([7; 3]);
        }
        let digest = sum(&store);
        store.extend(digest);
        store
    }

    #[test]
    fn certificates_are_added_and_replaced() {
        let own = store(&[b"a", b"b"]);
        let once = extend(&own, &[vec![1; 10]]).unwrap();
        assert_eq!(
            once.len(),
            own.len() + 4 + 2 + ALIAS.len() + 1 + 8 + 2 + KIND.len() + 4 + 10
        );
        assert_eq!(&once[8..12], [0, 0, 0, 3]);
        assert_eq!(extend(&once, &[vec![1; 10]]).unwrap(), once);
        let other = extend(&once, &[vec![2; 10], vec![3; 5]]).unwrap();
        assert_eq!(&other[8..12], [0, 0, 0, 4]);
        assert_eq!(extend(&other, &[]).unwrap(), own);
    }

    #[test]
    fn other_stores_are_left_alone() {
        let own = store(&[b"a"]);
        for at in 0..own.len() {
            let mut broken = own.clone();
            broken[at] ^= 1;
            assert_eq!(extend(&broken, &[]), None, "{at}");
            assert_eq!(extend(&own[..at], &[]), None, "{at}");
        }
        let signed = |mut content: Vec<u8>| {
            let digest = sum(&content);
            content.extend(digest);
            content
        };
        for content in [
            vec![],
            [MAGIC, VERSION, 1].map(u32::to_be_bytes).concat(),
            [MAGIC, VERSION, u32::MAX].map(u32::to_be_bytes).concat(),
            [MAGIC, 1, 0].map(u32::to_be_bytes).concat(),
            [MAGIC, VERSION, 0, 0].map(u32::to_be_bytes).concat(),
            [MAGIC, VERSION, 1, 1].map(u32::to_be_bytes).concat(),
        ] {
            assert_eq!(extend(&signed(content.clone()), &[]), None, "{content:?}");
        }
    }
}
