//! The sandbox's trust in the egress gateway, and in what its operator trusts: CA certificates in the image's trust store,
//! and in the variables by which common runtimes learn of one.
//!
//! Trust stores are files, and every distribution has its own. Three things are done, so that most programs find the
//! certificate without more:
//!
//! - It is appended to each bundle of system roots that the image has, between two marks by which the next one takes
//!   its place. That is what programs read that were started without our environment, by `sudo` for one.
//! - It is put where the image's own tool collects local certificates, so that a bundle which is made anew has it too.
//! - Where OpenSSL looks for a bundle and there is none, it is led to the one there is.
//!
//! Local certificates of the image that its tool has not collected are collected here ([`local`]), so that it makes no
//! difference whether the tool was run.
//!
//! Some programs bring their own roots and take others out of a variable *instead*. They are given a bundle with the
//! system's roots only; an image without any would otherwise lose every host but those behind the gateway. Variables
//! that *add* certificates are always set, and have the same bundle: what one program trusts, all do. Node.js 20 takes 22 ms
//! of processor time more at its start for that, of 46; later versions 8 ms at the first connection with TLS; Deno nothing.
//! Java reads none; the store of the distribution's Java is extended ([`java`]).
//!
//! Only certificates ever come here. The private key stays with the gateway.

pub(crate) mod files;
mod java;
mod local;
mod pem;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use protocol::agent::TRUST_BEGIN;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use local::{ANCHOR, ANCHORS};
pub(crate) use pem::Bundle;

/// The certificates of the host alone, under a name of ours: first that of the gateway.
const OWN: &str = "run/ringfence/ca.pem";
/// A bundle for an image whose own ones cannot be written.
const OWN_BUNDLE: &str = "run/ringfence/ca-bundle.pem";
/// Where Debian, Ubuntu, Alpine and many others have their bundle; made where an image has none at all.
const USUAL: &str = "etc/ssl/certs/ca-certificates.crt";
/// Bundles of system roots. Where one is a link to another, the other is in the list as well.
const BUNDLES: [&str; 7] = [
    USUAL,
    // Fedora, RHEL and their kin.
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/pki/tls/certs/ca-bundle.crt",
    // SUSE.
    "var/lib/ca-certificates/ca-bundle.pem",
    "etc/ssl/ca-bundle.pem",
    // Arch.
    "etc/ca-certificates/extracted/tls-ca-bundle.pem",
    "etc/ssl/cert.pem",
];
/// How many files of ours there may be among local certificates; more than the host ever has.
const ANCHORS_MAX: usize = 256;
/// The tool of Debian and Alpine, which looks into the first of [`ANCHORS`].
const COLLECTOR: &str = "usr/sbin/update-ca-certificates";
/// Where OpenSSL's builds look for a bundle, beside a directory that has certificates under hashes of their names.
const OPENSSL: [&str; 2] = ["etc/ssl/cert.pem", "usr/lib/ssl/cert.pem"];
/// Variables whose bundle takes the place of a program's own roots: OpenSSL with what uses it, and Go; Python's
/// requests; curl; the AWS tools; cargo; gRPC; Nix. Not git's: it would replace what a user configured for a server of
/// their own, and git reads the system's bundle.
const REPLACING: [&str; 7] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "NIX_SSL_CERT_FILE",
];
/// Variables whose certificates come beside a program's own roots: Node.js, Deno.
const ADDING: [&str; 2] = ["NODE_EXTRA_CA_CERTS", "DENO_CERT"];
const BEGIN_MARK: &str = TRUST_BEGIN;
const END_MARK: &str = "# End of the certificate of this sandbox's egress gateway\n";

/// What was installed, as variables for programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trust {
    /// Everything that is to be trusted beside a program's own roots.
    adding: &'static str,
    /// Path of the bundle with system roots, local certificates and those of the host; none in an image without roots.
    bundle: Option<&'static str>,
}

impl Trust {
    /// Variables of every process that does not set them itself.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let adding = ADDING.iter().map(|name| (*name, self.adding));
        let replacing = REPLACING
            .iter()
            .filter_map(|name| self.bundle.map(|bundle| (*name, bundle)));
        adding
            .chain(replacing)
            .map(|(name, path)| (name.to_owned(), format!("/{path}")))
            .collect()
    }
}

/// Puts a certificate into the trust store of the image at `root`, in place of one that was put there before.
/// Repeating it repairs what is gone and writes nothing else.
///
/// # Errors
/// When not even the files of our own can be written. What was written by then stays, which is complete files only.
pub(crate) fn install(root: &Path, bundle: &Bundle) -> io::Result<Trust> {
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let before = files::read(&root, OWN).ok();
    let before = before.and_then(|(content, _)| Bundle::find(&content));
    let own: Vec<&str> = bundle
        .certificates()
        .chain(before.iter().flat_map(Bundle::certificates))
        .collect();
    let more = Certificates {
        host: bundle,
        own: &own,
        local: &local::find(&root),
    };
    let mut system = None;
    for path in BUNDLES {
        match extend(&root, path, &more) {
            Ok(true) => system = system.or(Some(path)),
            // There without a single root: by us, for programs that read no variable.
            Ok(false) => {}
            // Not there, or a link to one that is, or not to be written.
            Err(_) => {}
        }
    }
    let mut adding = system;
    if system.is_none() {
        (system, adding) = elsewhere(&root, &more)?;
    }
    for path in OPENSSL {
        // Mostly it is there.
        let _ = lead(&root, path);
    }
    // Last, because it shows the next call which certificate is to be replaced.
    write(&root, OWN, bundle.text().as_bytes(), true)?;
    Ok(Trust {
        adding: adding.unwrap_or(OWN),
        bundle: system,
    })
}

/// What a bundle of the image gets.
struct Certificates<'a> {
    /// Certificates of the host.
    host: &'a Bundle,
    /// Certificates of the host, and those that a bundle had before.
    own: &'a [&'a str],
    /// Local certificates of the image that its tool may not have collected.
    local: &'a [String],
}

/// Puts a certificate where a program of the image finds it that needs long to start, or makes bundles anew. What cannot
/// be written is left out.
///
/// # Errors
/// When the image cannot be read.
pub(crate) fn install_more(root: &Path, bundle: &Bundle) -> io::Result<()> {
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let local = local::find(&root);
    let certificates: Vec<Vec<u8>> = bundle.ders().into_iter().chain(pem::ders(&local)).collect();
    for path in java::STORES {
        let _ = files::read(&root, path).and_then(|(store, mode)| {
            let extended = java::extend(&store, &certificates).filter(|extended| *extended != store);
            let Some(extended) = extended else { return Ok(()) };
            let (directory, name) = files::parent(&root, path, false)?;
            files::replace(&directory, name, &extended, mode)
        });
    }
    for directory in ANCHORS {
        // The tool is there before the directory is.
        let make = directory == ANCHORS[0] && files::read(&root, COLLECTOR).is_ok();
        let _ = anchor(&root, directory, bundle, make);
    }
    Ok(())
}

/// Puts each certificate of the host into a file of its own, as tools want them, and removes further ones of before.
fn anchor(root: &OwnedFd, directory: &str, bundle: &Bundle, make: bool) -> io::Result<()> {
    let mut certificates = bundle.certificates();
    for number in 0..ANCHORS_MAX {
        let name = match number {
            0 => format!("{directory}/{ANCHOR}.crt"),
            number => format!("{directory}/{ANCHOR}-{number}.crt"),
        };
        match certificates.next() {
            Some(certificate) => write(root, &name, certificate.as_bytes(), make)?,
            None => {
                let (directory, name) = files::parent(root, &name, false)?;
                match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
                    Err(Errno::NOENT) => break,
                    removed => removed?,
                }
            }
        }
    }
    Ok(())
}

/// Has a bundle of the image end in ours. Whether it has roots of its own.
fn extend(root: &OwnedFd, path: &str, more: &Certificates<'_>) -> io::Result<bool> {
    let (content, mode) = files::read(root, path)?;
    let (roots, extended) = compose(&content, more);
    if extended != content {
        let (directory, name) = files::parent(root, path, false)?;
        files::replace(&directory, name, &extended, mode)?;
    }
    Ok(roots)
}

/// For an image none of whose bundles could be extended: one of our own with the roots of whatever bundle can be read,
/// or the usual one where there are no roots. The bundle with roots, and that of everything else.
fn elsewhere(root: &OwnedFd, more: &Certificates<'_>) -> io::Result<(Option<&'static str>, Option<&'static str>)> {
    // Only what is a certificate gets into a file that all users may read: the name may lead to anything.
    let found = BUNDLES
        .iter()
        .filter_map(|path| Bundle::find(&files::read_through(root, path).ok()?))
        .map(|found| compose(found.text().as_bytes(), more))
        .find(|(roots, _)| *roots);
    if let Some((_, extended)) = found {
        write(root, OWN_BUNDLE, &extended, true)?;
        return Ok((Some(OWN_BUNDLE), Some(OWN_BUNDLE)));
    }
    let (_, alone) = compose(b"", more);
    // There programs look that know of no variable. Where it cannot be, there is still the file of our own.
    let written = write(root, USUAL, &alone, true);
    Ok((None, written.is_ok().then_some(USUAL)))
}

/// Whether there are certificates other than those of the host in `content`, and what it becomes with all that it lacks at
/// its end.
fn compose(content: &[u8], more: &Certificates<'_>) -> (bool, Vec<u8>) {
    let mut kept = without(content, marked);
    // The image's tool may have collected it since.
    for certificate in more.own {
        let finder = memchr::memmem::Finder::new(certificate.as_bytes());
        kept = without(&kept, |content| {
            finder.find(content).map(|at| (at, at + certificate.len()))
        });
    }
    let roots = memchr::memmem::find(&kept, b"-----BEGIN CERTIFICATE-----").is_some();
    if kept.last().is_some_and(|last| *last != b'\n') {
        kept.push(b'\n');
    }
    let collected = if more.local.is_empty() {
        None
    } else {
        Bundle::find(&kept)
    };
    let is_missing = |certificate: &&String| {
        let is_own = more.own.contains(&certificate.as_str());
        !is_own && !collected.iter().any(|collected| collected.has(certificate))
    };
    let local: String = more.local.iter().filter(is_missing).cloned().collect();
    for part in [BEGIN_MARK, &more.host.text(), &local, END_MARK] {
        kept.extend_from_slice(part.as_bytes());
    }
    (roots, kept)
}

/// What is left without the parts that `find` returns, one after the other.
fn without(mut content: &[u8], find: impl Fn(&[u8]) -> Option<(usize, usize)>) -> Vec<u8> {
    let mut kept = Vec::with_capacity(content.len());
    while let Some((begin, end)) = find(content) {
        kept.extend_from_slice(&content[..begin]);
        content = &content[end..];
    }
    kept.extend_from_slice(content);
    kept
}

/// Where an earlier bundle of ours is: between the first end that has a beginning, and the last beginning before it.
fn marked(content: &[u8]) -> Option<(usize, usize)> {
    let mut from = 0;
    loop {
        let end = from + memchr::memmem::find(&content[from..], END_MARK.as_bytes())?;
        let after = end + END_MARK.len();
        if let Some(begin) = memchr::memmem::rfind(&content[from..end], BEGIN_MARK.as_bytes()) {
            return Some((from + begin, after));
        }
        from = after;
    }
}

/// Writes a file unless it has this content. With `make`, its directory is made too.
fn write(root: &OwnedFd, path: &str, content: &[u8], make: bool) -> io::Result<()> {
    let (directory, name) = files::parent(root, path, make)?;
    if files::read(root, path).is_ok_and(|(before, _)| before == content) {
        return Ok(());
    }
    files::replace(&directory, name, content, Mode::from_raw_mode(0o644))
}

/// Leads from one of OpenSSL's places to the usual bundle, where that exists and the place is free.
fn lead(root: &OwnedFd, path: &str) -> io::Result<()> {
    files::read(root, USUAL)?;
    let (directory, name) = files::parent(root, path, false)?;
    Ok(rustix::fs::symlinkat(format!("/{USUAL}"), directory, name)?)
}

#[cfg(test)]
mod tests;
