//! Distribution of an image, and the packages that it lacks.

use std::os::fd::OwnedFd;

use anyhow::Result;
use protocol::agent::TRUST_BEGIN;
use protocol::image::PackageTool;
use rustix::fs::{OFlags, ResolveFlags};

use crate::{files, users};

/// Bundles of system roots of the known families.
const BUNDLES: [&[u8]; 4] = [
    b"etc/ssl/certs/ca-certificates.crt",
    b"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    b"etc/pki/tls/certs/ca-bundle.crt",
    b"etc/ca-certificates/extracted/tls-ca-bundle.pem",
];
/// Fewer certificates are not the roots of a system: the agent puts its own one where there is no bundle.
const ROOTS_MIN: usize = 10;
const DIRECTORIES: [&str; 5] = ["bin", "usr/bin", "sbin", "usr/sbin", "usr/local/bin"];

/// The values of `/etc/os-release` that matter here.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OsRelease {
    pub(super) id: Option<String>,
    like: Vec<String>,
}

impl OsRelease {
    pub(super) fn read(root: &OwnedFd) -> Result<Self> {
        let mut text = users::read(root, b"etc/os-release")?;
        if text.is_none() {
            text = users::read(root, b"usr/lib/os-release")?;
        }
        Ok(Self::parse(&text.unwrap_or_default()))
    }

    fn parse(text: &str) -> Self {
        let mut os = Self::default();
        for line in text.lines() {
            let Some((key, value)) = line.trim().split_once('=') else {
                continue;
            };
            let value = value.trim_matches(['"', '\'']).to_ascii_lowercase();
            match key {
                "ID" if !value.is_empty() => os.id = Some(value),
                "ID_LIKE" => os.like = value.split_ascii_whitespace().map(str::to_owned).collect(),
                _ => {}
            }
        }
        os
    }

    /// How packages are installed.
    pub(super) fn tool(&self) -> Option<PackageTool> {
        self.id.iter().chain(&self.like).find_map(|id| match id.as_str() {
            "debian" | "ubuntu" => Some(PackageTool::AptGet),
            "alpine" => Some(PackageTool::Apk),
            "fedora" | "centos" | "rocky" | "almalinux" | "rhel" => Some(PackageTool::Dnf),
            "arch" | "archarm" => Some(PackageTool::Pacman),
            _ => None,
        })
    }

    /// The group of administrators where the image has none.
    pub(super) fn admin_group(&self) -> &'static str {
        match self.tool() {
            Some(PackageTool::Apk | PackageTool::Dnf | PackageTool::Pacman) => "wheel",
            Some(PackageTool::AptGet) | None => "sudo",
        }
    }
}

/// Names of packages that the image lacks.
pub(super) fn missing(root: &OwnedFd) -> Result<Vec<String>> {
    let mut missing: Vec<String> = ["bash", "sudo"]
        .into_iter()
        .filter(|program| !has_program(root, program))
        .map(str::to_owned)
        .collect();
    if !has_roots(root)? {
        missing.push("ca-certificates".to_owned());
    }
    Ok(missing)
}

/// Packages with programs that start and ready commands of many templates need.
pub(super) fn wanted(root: &OwnedFd, tool: Option<PackageTool>) -> Vec<String> {
    let sockets = match tool {
        Some(PackageTool::Dnf) => "iproute",
        _ => "iproute2",
    };
    [("curl", "curl"), ("ss", sockets)]
        .into_iter()
        .filter(|(program, _)| !has_program(root, program))
        .map(|(_, package)| package.to_owned())
        .collect()
}

/// Whether there is a file of that path, links followed within the image.
pub(super) fn exists(root: &OwnedFd, path: &str) -> bool {
    files::open(root, path.as_bytes(), OFlags::PATH, ResolveFlags::IN_ROOT).is_ok()
}

fn has_program(root: &OwnedFd, program: &str) -> bool {
    DIRECTORIES
        .iter()
        .any(|directory| exists(root, &format!("{directory}/{program}")))
}

fn has_roots(root: &OwnedFd) -> Result<bool> {
    for bundle in BUNDLES {
        let text = users::read(root, bundle)?.unwrap_or_default();
        // What the operator trusts is not a system's roots, however many these are.
        let text = text.split(TRUST_BEGIN).next().unwrap_or_default();
        if text.matches("-----BEGIN").nth(ROOTS_MIN - 1).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_told_by_id_and_likeness() {
        for (text, expect) in [
            ("ID=debian\n", Some(PackageTool::AptGet)),
            (
                "NAME=x\nID=linuxmint\nID_LIKE=\"ubuntu debian\"\n",
                Some(PackageTool::AptGet),
            ),
            ("ID=alpine", Some(PackageTool::Apk)),
            (
                "ID=\"almalinux\"\nID_LIKE=\"rhel centos fedora\"",
                Some(PackageTool::Dnf),
            ),
            ("ID='arch'", Some(PackageTool::Pacman)),
            ("ID=void", None),
            ("", None),
        ] {
            assert_eq!(OsRelease::parse(text).tool(), expect, "{text}");
        }
        assert_eq!(OsRelease::parse("ID=alpine").admin_group(), "wheel");
        assert_eq!(OsRelease::parse("").admin_group(), "sudo");
    }
}
