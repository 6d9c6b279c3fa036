//! Everything that is built in may be given away in a binary under any terms, and brings one TLS library.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::breach::Breach;
use super::crates::cargo;

/// Licences that ask for no more than to be named.
const PERMISSIVE: [&str; 14] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Packages that implement TLS or its cryptography. Two of them are two sets of bugs, and twice the binary's.
const TLS_PROVIDERS: [&str; 8] = [
    "aws-lc-rs",
    "boring",
    "graviola",
    "mbedtls",
    "native-tls",
    "openssl",
    "ring",
    "rustls-openssl",
];

pub(super) fn check(root: &Path) -> Result<Vec<Breach>> {
    // What is built for this target with these features: the lock file also names packages that never are.
    let arguments = [
        "tree",
        "--workspace",
        "--offline",
        "--locked",
        "--edges=normal,build,dev",
        "--prefix=none",
        "--format={p}|{l}",
    ];
    Ok(judge(&packages(&cargo(root, &arguments)?)?))
}

/// Name and version of every package, with its licence.
fn packages(told: &str) -> Result<BTreeMap<String, String>> {
    told.lines()
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (package, licence) = line
                .split_once('|')
                .with_context(|| format!("no licence in {line:?}"))?;
            let package: Vec<&str> = package.split(' ').take(2).collect();
            Ok((package.join(" "), licence.trim_end_matches(" (*)").to_owned()))
        })
        .collect()
}

fn judge(packages: &BTreeMap<String, String>) -> Vec<Breach> {
    let mut breaches = Vec::new();
    for (package, licence) in packages {
        if !permissive(licence) {
            let message = format!("its licence {licence:?} is not known as permissive");
            breaches.push(Breach {
                rule: "licence",
                subject: package.clone(),
                message,
            });
        }
    }
    let name = |package: &str| package.split(' ').next().unwrap_or_default().to_owned();
    let found: Vec<String> = packages
        .keys()
        .map(|package| name(package))
        .filter(|name| TLS_PROVIDERS.contains(&name.as_str()))
        .collect();
    if let [first, others @ ..] = found.as_slice() {
        for other in others {
            let message = format!("is built in beside {first}: one TLS provider is enough");
            breaches.push(Breach {
                rule: "tls",
                subject: other.clone(),
                message,
            });
        }
    }
    breaches
}

/// Whether an SPDX expression allows a choice of permissive licences only. `/` is the old way to write `OR`.
fn permissive(expression: &str) -> bool {
    let text = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut at = 0;
    either(&words, &mut at) && at == words.len()
}

fn either(words: &[&str], at: &mut usize) -> bool {
    let mut any = both(words, at);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        any |= both(words, at);
    }
    any
}

fn both(words: &[&str], at: &mut usize) -> bool {
    let mut all = one(words, at);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        all &= one(words, at);
    }
    all
}

fn one(words: &[&str], at: &mut usize) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let inside = either(words, at);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return inside && closed;
    }
    if let ["WITH", exception, ..] = &words[*at..] {
        *at += 2;
        return PERMISSIVE.contains(&format!("{word} WITH {exception}").as_str());
    }
    PERMISSIVE.contains(word)
}

#[cfg(test)]
mod tests {
    use super::{judge, packages, permissive};

    #[test]
    fn expressions() {
        for (expression, want) in [
            ("MIT", true),
            ("MIT OR Apache-2.0", true),
            ("MIT/Apache-2.0", true),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("Apache-2.0 WITH LLVM-exception OR GPL-2.0", true),
            ("GPL-3.0-only OR MIT", true),
            ("GPL-3.0-only", false),
            ("MIT AND GPL-3.0-only", false),
            ("(MIT AND LGPL-2.1) OR MPL-2.0", false),
            ("GPL-2.0 WITH Classpath-exception-2.0", false),
            ("MIT MIT", false),
            ("(MIT", false),
            ("", false),
        ] {
            assert_eq!(permissive(expression), want, "{expression}");
        }
    }

    #[test]
    fn packages_are_judged_by_licence_and_provider() {
        let check = |told: &str| -> Vec<String> {
            let packages = packages(told).expect("read");
            judge(&packages).into_iter().map(|breach| breach.to_string()).collect()
        };
        assert_eq!(
            check("a v1.0.0|MIT\na v1.0.0|MIT (*)\naws-lc-rs v1.0.0|ISC\n"),
            Vec::<String>::new()
        );
        assert_eq!(
            check("aws-lc-rs v1.0.0|ISC\nours v0.1.0 (/ours)|GPL-3.0\nring v0.17.0 |ISC\n"),
            [
                "licence: ours v0.1.0: its licence \"GPL-3.0\" is not known as permissive",
                "tls: ring: is built in beside aws-lc-rs: one TLS provider is enough",
            ]
        );
    }
}
