//! Archives of attackers.

use image::Program;
use protocol::image::{CopyJob, UnpackLimits};

use crate::archive::{
    Member, checksum, dir, field, file, gzip, hard_link, header, member, raw, record, symlink, tar, zstd,
};
use crate::{Root, run};

/// What an archive must lead to: a message with these words, or these paths.
pub(crate) enum Expect {
    Refused(&'static str),
    Unpacked(&'static [&'static str]),
}

use Expect::{Refused, Unpacked};

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) archive: Vec<u8>,
    /// As an upload, whose archive may not lead out of itself.
    pub(crate) upload: Expect,
    /// As an image, which is a root of its own.
    pub(crate) image: Expect,
}

fn case(name: &'static str, archive: Vec<u8>, upload: Expect, image: Expect) -> Case {
    Case {
        name,
        archive,
        upload,
        image,
    }
}

/// An archive of one header without changes.
fn one(header: [u8; 512]) -> Vec<u8> {
    let mut bytes = header.to_vec();
    bytes.resize(2048, 0);
    bytes
}

/// A header of a file with another field; the checksum is right.
fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut header = header(b'0', b"f");
    for (at, length) in [(100, 8), (108, 8), (116, 8), (124, 12), (136, 12)] {
        field(&mut header, at, length, 0);
    }
    header[at..at + bytes.len()].copy_from_slice(bytes);
    checksum(&mut header);
    one(header)
}

fn pax(records: &[u8]) -> Vec<u8> {
    let mut bytes = raw(b'x', b"pax", records);
    bytes.extend(tar(&[file("f", "x")]));
    bytes
}

const BIG: u64 = 1 << 40;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = paths();
    cases.extend(links());
    cases.extend(headers());
    cases.extend(contents());
    cases
}

fn paths() -> Vec<Case> {
    let deep = vec!["d"; 1200].join("/");
    let long = "n".repeat(300);
    let too_long = "p/".repeat(5000);
    vec![
        case(
            "parent",
            tar(&[file("../outside/x", "x")]),
            Refused("leads out"),
            Refused("leads out"),
        ),
        case(
            "parent alone",
            tar(&[dir("..")]),
            Refused("leads out"),
            Refused("leads out"),
        ),
        case(
            "parent inside",
            tar(&[file("a/../../outside/x", "x")]),
            Refused("leads out"),
            Refused("leads out"),
        ),
        case(
            "parent at the end",
            tar(&[dir("a/..")]),
            Refused("leads out"),
            Refused("leads out"),
        ),
        case(
            "absolute",
            tar(&[file("/outside/x", "x")]),
            Refused("absolute"),
            Unpacked(&["outside/x"]),
        ),
        case(
            "two slashes",
            tar(&[file("//outside/x", "x")]),
            Refused("absolute"),
            Unpacked(&["outside/x"]),
        ),
        case(
            "parent in pax",
            tar(&[file("f", "x").pax("path", b"../outside/x")]),
            Refused("leads out"),
            Refused("leads out"),
        ),
        case(
            "dots and slashes",
            tar(&[file("./a//./b", "x")]),
            Unpacked(&["a/b"]),
            Unpacked(&["a/b"]),
        ),
        case(
            "three dots",
            tar(&[file("a/.../b", "x")]),
            Unpacked(&["a/.../b"]),
            Unpacked(&["a/.../b"]),
        ),
        case("no name", tar(&[file("", "x")]), Refused("no name"), Refused("no name")),
        case(
            "dot as a file",
            tar(&[file(".", "x")]),
            Refused("no name"),
            Refused("no name"),
        ),
        case(
            "NUL",
            tar(&[file("f", "x").pax("path", b"a\0b")]),
            Refused("NUL"),
            Refused("NUL"),
        ),
        case(
            "NUL in a link",
            tar(&[symlink("l", "x").pax("linkpath", b"a\0b")]),
            Refused("NUL"),
            Refused("NUL"),
        ),
        case(
            "name too long",
            tar(&[file(&long, "x")]),
            Refused("name too long"),
            Refused("name too long"),
        ),
        case(
            "path too long",
            tar(&[file(&too_long, "x")]),
            Refused("extended header"),
            Refused("extended header"),
        ),
        case(
            "deep",
            tar(&[file(&format!("{deep}/f"), "x")]),
            Unpacked(&["d/d/d"]),
            Unpacked(&["d/d/d"]),
        ),
        case(
            "no UTF-8",
            tar(&[Member {
                path: b"\xff\xfe".to_vec(),
                ..file("", "x")
            }]),
            Unpacked(&[]),
            Unpacked(&[]),
        ),
        case(
            "line end",
            tar(&[file("a\nb", "x")]),
            Unpacked(&["a\nb"]),
            Unpacked(&["a\nb"]),
        ),
        case(
            "file as a directory",
            tar(&[file("f", "x"), file("f/x", "y")]),
            Unpacked(&["f/x"]),
            Unpacked(&["f/x"]),
        ),
        case(
            "directory, then file",
            tar(&[file("d/x", "x"), file("d", "y")]),
            Unpacked(&["d"]),
            Unpacked(&["d"]),
        ),
        case(
            "the same file again",
            tar(&[file("f", "x"), file("f", "y")]),
            Unpacked(&["f"]),
            Unpacked(&["f"]),
        ),
    ]
}

fn links() -> Vec<Case> {
    let out = |target| tar(&[symlink("l", target), file("l/x", "x")]);
    vec![
        case(
            "through a link out",
            out("../outside"),
            Refused("leads out"),
            Unpacked(&["l"]),
        ),
        case(
            "through an absolute link",
            out("/outside"),
            Refused("leads out"),
            Unpacked(&["l"]),
        ),
        case(
            "through a link to the root",
            out("/"),
            Refused("leads out"),
            Unpacked(&["x"]),
        ),
        case(
            "through a link inside",
            tar(&[dir("d"), symlink("l", "d"), file("l/x", "x")]),
            Unpacked(&["d/x"]),
            Unpacked(&["d/x"]),
        ),
        case(
            "through two links",
            tar(&[symlink("a", "b"), symlink("b", ".."), file("a/x", "x")]),
            Refused("leads out"),
            Unpacked(&["x"]),
        ),
        case(
            "through a loop",
            tar(&[symlink("a", "b"), symlink("b", "a"), file("a/x", "x")]),
            Refused("unpack a/x"),
            Refused("unpack a/x"),
        ),
        case(
            "through /proc",
            out("/proc/self/cwd"),
            Refused("leads out"),
            Unpacked(&["l"]),
        ),
        case(
            "file over a link",
            tar(&[symlink("l", "../outside/secret"), file("l", "x")]),
            Unpacked(&["l"]),
            Unpacked(&["l"]),
        ),
        case(
            "directory over a link",
            tar(&[symlink("l", "../outside"), dir("l").mode(0o777)]),
            Unpacked(&["l"]),
            Unpacked(&["l"]),
        ),
        case(
            "hard link out",
            tar(&[hard_link("h", "../outside/secret")]),
            Refused("out of the archive"),
            Refused("out of the archive"),
        ),
        case(
            "absolute hard link",
            tar(&[hard_link("h", "/outside/secret")]),
            Refused("out of the archive"),
            Refused("does not exist"),
        ),
        case(
            "hard link through a link",
            tar(&[symlink("l", "../outside"), hard_link("h", "l/secret")]),
            Refused("does not exist"),
            Refused("does not exist"),
        ),
        case(
            "hard link to a link",
            tar(&[symlink("l", "../outside/secret"), hard_link("h", "l"), file("h", "x")]),
            Unpacked(&["h"]),
            Unpacked(&["h"]),
        ),
        case(
            "hard link to itself",
            tar(&[file("h", "x"), hard_link("h", "./h")]),
            Refused("itself"),
            Refused("itself"),
        ),
        case(
            "hard link to a directory",
            tar(&[dir("d"), hard_link("h", "d")]),
            Refused("directory"),
            Refused("directory"),
        ),
        case(
            "hard link to nothing",
            tar(&[hard_link("h", "none")]),
            Refused("does not exist"),
            Refused("does not exist"),
        ),
        case(
            "hard link, then file",
            tar(&[file("f", "x"), hard_link("h", "f"), file("h", "y")]),
            Unpacked(&["f", "h"]),
            Unpacked(&["f", "h"]),
        ),
        case(
            "link without a target",
            tar(&[symlink("l", "")]),
            Refused("without a target"),
            Refused("without a target"),
        ),
        case(
            "device",
            tar(&[member(b'3', "dev/sda")]),
            Refused("device"),
            Unpacked(&["dev"]),
        ),
        case(
            "block device",
            tar(&[member(b'4', "sda")]),
            Refused("device"),
            Unpacked(&[]),
        ),
        case(
            "named pipe",
            tar(&[member(b'6', "p")]),
            Refused("named pipes"),
            Unpacked(&["p"]),
        ),
    ]
}

fn headers() -> Vec<Case> {
    let refused = |name, archive, words| case(name, archive, Refused(words), Refused(words));
    let mut broken = tar(&[file("f", "x")]);
    broken[0] = b'g';
    let mut unsummed = tar(&[file("f", "x")]);
    unsummed[148..156].fill(b'z');
    let mut globals = raw(b'g', b"pax", &record(b"path", b"../x"));
    globals.extend(tar(&[file("f", "x")]));
    let mut chain = Vec::new();
    for _ in 0..20 {
        chain.extend(raw(b'x', b"pax", &record(b"comment", b"x")));
    }
    chain.extend(tar(&[file("f", "x")]));
    let mut lone = raw(b'x', b"pax", &record(b"path", b"x"));
    lone.resize(lone.len() + 1024, 0);
    vec![
        refused("wrong checksum", broken, "checksum"),
        refused("no archive", vec![b'x'; 4096], "not a tar archive"),
        refused("checksum no number", unsummed, "not a tar archive"),
        refused("size no number", with(124, b"99999999999\0"), "size"),
        refused("negative size", with(124, &[0xff; 12]), "size"),
        refused(
            "huge size",
            with(
                124,
                &[0x80, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            ),
            "size",
        ),
        refused(
            "size of all bits",
            with(124, &[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            "size",
        ),
        refused("mode no number", with(100, b"rwxrwxrw"), "mode"),
        refused("user id no number", with(108, b"user\0\0\0\0"), "user id"),
        refused("unknown type", with(156, b"Z"), "unknown type"),
        refused("sparse", with(156, b"S"), "sparse"),
        refused("sparse in pax", pax(&record(b"GNU.sparse.map", b"0,1")), "sparse"),
        refused("pax without a length", pax(b"path=x\n"), "pax"),
        refused("pax too short", pax(b"5 a=b\n"), "pax"),
        refused("pax too long", pax(b"99 a=b\n"), "pax"),
        refused("pax of length 0", pax(b"0 a=b\n"), "pax"),
        refused("pax without a key", pax(b"5 =b\n"), "pax"),
        refused("pax size no number", pax(&record(b"size", b"-1")), "size"),
        refused(
            "pax size too large",
            pax(&record(b"size", b"18446744073709551615")),
            "size",
        ),
        refused("pax time no number", pax(&record(b"mtime", b"1.x")), "mtime"),
        refused(
            "pax of 2 MiB",
            raw(b'x', b"pax", &vec![b'x'; 2 << 20]),
            "extended header",
        ),
        refused(
            "long name of 2 MiB",
            raw(b'L', b"x", &vec![b'x'; 2 << 20]),
            "extended header",
        ),
        refused("too many extended headers", chain, "too many"),
        refused("extended header at the end", lone, "extended header"),
        case("global header", globals, Unpacked(&["f"]), Unpacked(&["f"])),
        case("empty", vec![0; 1024], Unpacked(&[]), Unpacked(&[])),
        case("no end", file("f", "x").bytes(), Unpacked(&["f"]), Unpacked(&["f"])),
    ]
}

fn contents() -> Vec<Case> {
    let refused = |name, archive, words| case(name, archive, Refused(words), Refused(words));
    let good = tar(&[file("f", "content")]);
    let mut damaged = gzip(&good);
    let end = damaged.len() - 6;
    damaged[end] ^= 1;
    let mut frame = zstd(&good);
    let last = frame.len() - 1;
    frame[last] ^= 1;
    let mut two = zstd(&good[..600]);
    two.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
    two.extend(zstd(&good[600..]));
    let bomb = file("bomb", "").size(300 << 20);
    let mut bomb = bomb.bytes();
    bomb.resize(300 << 20, 0);
    let many: Vec<Member> = (0..2000).map(|number| file(&number.to_string(), "")).collect();
    vec![
        refused("truncated header", good[..300].to_vec(), "truncated"),
        refused("truncated file", good[..514].to_vec(), "truncated"),
        refused("truncated gzip", gzip(&good)[..40].to_vec(), ""),
        refused("wrong checksum of gzip", damaged, "corrupt gzip"),
        refused("wrong checksum of zstd", frame, "zstd"),
        refused("truncated zstd", zstd(&good)[..20].to_vec(), "zstd"),
        refused("xz", b"\xfd7zXZ\0xxxx".to_vec(), "xz"),
        refused("bzip2", b"BZh91AY".to_vec(), "bzip2"),
        refused(
            "a size that is not there",
            tar(&[file("f", "x").size(BIG)]),
            "too large",
        ),
        refused("bomb", gzip(&bomb), "too large"),
        refused("bomb of files", gzip(&tar(&many)), "too large: more than 1500 files"),
        // As umoci writes it.
        case(
            "padding left out",
            good[..520].to_vec(),
            Unpacked(&["f"]),
            Unpacked(&["f"]),
        ),
        case("two frames", two, Unpacked(&["f"]), Unpacked(&["f"])),
    ]
}

pub(crate) const LIMITS: UnpackLimits = UnpackLimits {
    bytes: 100 << 20,
    entries: 1500,
};

#[test]
fn uploads_are_refused_or_stay_inside() {
    let cases = cases();
    assert!(cases.len() >= 80);
    let mut wrong = Vec::new();
    for case in cases {
        let root = Root::new();
        std::fs::create_dir(root.beside("outside")).unwrap();
        std::fs::write(root.beside("outside/secret"), "secret").unwrap();
        // The same again where the archive is unpacked.
        std::fs::create_dir(root.work().join("outside")).unwrap();
        std::fs::write(root.work().join("outside/secret"), "secret").unwrap();
        std::fs::write(root.beside("archive"), &case.archive).unwrap();
        let job = CopyJob {
            archive: root.beside("archive"),
            from: None,
            patterns: Vec::new(),
            source: ".".to_owned(),
            dest: "/d".to_owned(),
            workdir: None,
            user: "root".to_owned(),
            owner: None,
            mode: None,
            limits: LIMITS,
            root: root.path(),
            work: root.work(),
            consume: true,
        };
        let done = run(Program::Copy, &job);
        wrong.extend(judge(case.name, &done, &case.upload, &root, "d/"));
        for below in [root.beside("outside"), root.work().join("outside")] {
            untouched(case.name, &below);
        }
        assert_eq!(std::fs::read_dir(root.work()).unwrap().count(), 1, "{}", case.name);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What is wrong with the outcome.
pub(crate) fn judge<T: std::fmt::Debug>(
    name: &str,
    done: &Result<T, String>,
    expect: &Expect,
    root: &Root,
    below: &str,
) -> Option<String> {
    match (done, expect) {
        (Err(error), Refused(words)) => {
            let is_right = error.to_lowercase().contains(&words.to_lowercase());
            (!is_right).then(|| format!("{name}: expected {words:?}: {error}"))
        }
        (Ok(_), Unpacked(paths)) => {
            let missing = paths
                .iter()
                .find(|path| root.state(&format!("{below}{path}")) == "missing");
            missing.map(|path| format!("{name}: {path} is missing"))
        }
        (Ok(done), Refused(words)) => Some(format!("{name}: must be refused with {words:?}, is {done:?}")),
        (Err(error), Unpacked(_)) => Some(format!("{name}: {error}")),
    }
}

pub(crate) fn untouched(name: &str, outside: &std::path::Path) {
    let names = std::fs::read_dir(outside).unwrap().count();
    assert_eq!(names, 1, "{name}");
    assert_eq!(
        std::fs::read_to_string(outside.join("secret")).unwrap(),
        "secret",
        "{name}"
    );
    assert_eq!(crate::state(&outside.join("secret")), "f 644 0:0", "{name}");
}
