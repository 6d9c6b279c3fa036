//! Layers become archives and archives layers, also hostile ones.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use model::id::LayerId;
use runtime::container::ContainerDriver;
use runtime::driver::Driver as _;
use runtime::stored::{LayerError, UnpackRequest};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use crate::layers::{stored, write_layer};
use crate::{Test, data_dir_of};

pub(crate) const TESTS: [Test; 3] = [
    (
        "a layer is the same after an archive",
        a_layer_is_the_same_after_an_archive,
    ),
    ("hostile archives are refused", hostile_archives_are_refused),
    ("transfers that stop leave nothing", transfers_that_stop_leave_nothing),
];

const BYTES: u64 = 64 << 20;

fn request(layer: &LayerId) -> UnpackRequest {
    UnpackRequest {
        layer: layer.clone(),
        bytes: BYTES,
        keep_free_bytes: 1 << 20,
    }
}

/// A file with this content, from its beginning.
fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0)).unwrap();
    file
}

fn pack(container: &ContainerDriver, layer: &LayerId) -> Vec<u8> {
    let to = tempfile::NamedTempFile::new().unwrap();
    container
        .storage()
        .pack_layer(layer, to.reopen().unwrap().into(), &|| false)
        .unwrap();
    fs::read(to.path()).unwrap()
}

fn unpack(container: &ContainerDriver, layer: &LayerId, archive: &[u8]) -> Result<u64, LayerError> {
    container
        .storage()
        .unpack_layer(&request(layer), file(archive).into(), &|| false)
}

fn path_of(container: &ContainerDriver, layer: &LayerId) -> PathBuf {
    data_dir_of(container).join("layers").join(layer.as_str())
}

#[expect(clippy::disallowed_methods, reason = "a program of the host, in a test")]
fn shell(directory: &Path, script: &str) -> String {
    let output = Command::new("sh")
        .args(["-euc", script])
        .current_dir(directory)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a script as root of the sandbox whose root directory this is.
fn inside(root: &Path, script: &str) {
    let pid = root.to_str().unwrap().split('/').nth(2).unwrap();
    fs::write(root.join("etc/passwd"), script).unwrap();
    let enter = format!("nsenter -t {pid} -U -m -S 0 -G 0 sh -euc 'cd /etc; . /etc/passwd'");
    shell(Path::new("/"), &enter);
}

/// All that a layer has, as `find` and `getfattr` show it.
fn listing(layer: &Path) -> String {
    let find = "find root usr ! -type c -printf '%p %y %m %U:%G %T@ %n %s %l\\n' -o -printf '%p %y %m %n\\n' | sort";
    let attributes = "python3 -c \"import os
for d, ds, fs in sorted(list(os.walk('root')) + list(os.walk('usr'))):
    for n in sorted(ds + fs):
        p = os.path.join(d, n)
        print(p, [(a, os.getxattr(p, a, follow_symlinks=False)) for a in sorted(os.listxattr(p, follow_symlinks=False))])\"";
    let sums = "find root usr -type f -size -10M -exec sha256sum {} + | sort";
    format!(
        "{}{}{}",
        shell(layer, find),
        shell(layer, attributes),
        shell(layer, sums)
    )
}

fn a_layer_is_the_same_after_an_archive(container: &ContainerDriver) {
    let layer = write_layer(container, |root| {
        inside(
            root,
            "mkdir -p deep/er new; echo content > deep/er/file; ln deep/er/file deep/link; ln deep/er/file second
            ln -s /etc/passwd symlink; ln -s $(printf 'x%.0s' $(seq 3000)) long-target
            mkfifo fifo; chmod 4755 second; touch -d @1000000000.123456789 deep/er
            truncate -s 5G sparse; printf end | dd of=sparse bs=1 seek=3000000000 conv=notrunc status=none
            head -c 5000000 /dev/urandom > random; rm -rf timezone skel; mkdir skel; : > empty; touch -d @-5 old
            printf x > \"$(printf 'n%.0s' $(seq 250))\"
            mkdir -p \"$(printf 'd%.0s' $(seq 200))/$(printf 'e%.0s' $(seq 200))\"; chown 1000:7 new
            python3 -c 'import os; os.setxattr(\"new\", \"user.note\", b\"a\\0b\\n=\")'
            printf x > 'line
break'",
        );
    });
    let path = path_of(container, &layer);
    let before = listing(&path);
    assert!(
        before.contains("root/etc/timezone c") && before.contains("overlay.opaque"),
        "{before}"
    );
    let archive = pack(container, &layer);
    assert!(archive.len() < 8 << 20, "{}", archive.len());
    assert!(
        pack(container, &layer) == archive,
        "the same layer has the same archive"
    );
    // Other programs can read it: what they list is what is there, except for the contents of devices.
    let data = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(data.path().join("layer.tar.zst"), &archive).unwrap();
    let names = shell(
        data.path(),
        "python3 - <<'END'
import subprocess, tarfile
tar = subprocess.run(['zstd', '-dc', 'layer.tar.zst'], capture_output=True, check=True).stdout
import io
entries = tarfile.open(fileobj=io.BytesIO(tar)).getmembers()
print(len(entries))
by_name = {entry.name: entry for entry in entries}
assert by_name['root/etc/sparse'].size == 5 << 30, by_name['root/etc/sparse'].size
assert by_name['root/etc/deep/er/file'].mode == 0o4755 and by_name['root/etc/skel'].isdir()
END",
    );
    assert_eq!(names.trim(), shell(&path, "find root usr -printf x | wc -c").trim());

    fs::remove_dir_all(&path).unwrap();
    assert!(matches!(
        container.storage().pack_layer(&layer, file(b"").into(), &|| false),
        Err(LayerError::NoLayer(_))
    ));
    let bytes = unpack(container, &layer, &archive).unwrap();
    assert_eq!(stored(container), [layer.as_str()]);
    assert_eq!(
        fs::read_to_string(path.join("bytes")).unwrap().trim(),
        bytes.to_string()
    );
    assert!(listing(&path) == before, "{}\n{before}", listing(&path));
    let sparse = fs::metadata(path.join("root/etc/sparse")).unwrap();
    assert!(sparse.blocks() < 1000, "{}", sparse.blocks());
    assert!(pack(container, &layer) == archive);
    // One that is stored is kept.
    assert_eq!(unpack(container, &layer, &archive).unwrap(), bytes);
    assert_eq!(stored(container), [layer.as_str()]);
    // What has changed on the disk is not given away.
    fs::write(path.join("root/etc/random"), "changed").unwrap();
    let packed = container.storage().pack_layer(&layer, file(b"").into(), &|| false);
    assert!(matches!(packed, Err(LayerError::Refused(_))), "{packed:?}");
}

/// An entry of an archive, as any program can write it.
fn entry(path: &str, flag: u8, fields: &[(usize, &[u8])], data: &[u8]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..path.len()].copy_from_slice(path.as_bytes());
    block[100..108].copy_from_slice(b"0000755\0");
    for at in [108, 116] {
        block[at..at + 8].copy_from_slice(b"0000000\0");
    }
    block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    block[136..148].copy_from_slice(b"00000000000\0");
    block[156] = flag;
    block[257..265].copy_from_slice(b"ustar\x0000");
    if flag == b'3' {
        block[329..336].copy_from_slice(b"0000000");
        block[337..344].copy_from_slice(b"0000000");
    }
    for (at, bytes) in fields {
        block[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block.extend_from_slice(data);
    block.resize(block.len().next_multiple_of(512), 0);
    block
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest + 1..rest + 9).find(|length| length.to_string().len() + rest == *length);
        data.extend_from_slice(format!("{} {key}=", length.unwrap()).as_bytes());
        data.extend_from_slice(value);
        data.push(b'\n');
    }
    entry("pax", b'x', &[], &data)
}

fn hostile_archives_are_refused(container: &ContainerDriver) {
    let layer = write_layer(container, |root| fs::write(root.join("etc/passwd"), "changed").unwrap());
    let good = pack(container, &layer);
    fs::remove_dir_all(path_of(container, &layer)).unwrap();
    let canary = tempfile::tempdir_in("/var/tmp").unwrap();
    let canary_path = canary.path().to_str().unwrap();
    let root = || entry("root/", b'5', &[], b"");
    let end = || vec![0; 1024];
    let file = |path: &str, data: &[u8]| entry(path, b'0', &[], data);
    let of = |parts: &[Vec<u8>]| parts.concat();
    let link = |path: &str, to: &str| entry(path, b'2', &[(157, to.as_bytes())], b"");
    let sparse = |map: &str| {
        let mut data = map.as_bytes().to_vec();
        data.resize(512, 0);
        let pax = pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"root/sparse"),
            ("GNU.sparse.realsize", b"1000000"),
        ]);
        of(&[root(), pax, file("root/sparse", &data), end()])
    };
    let attribute = |name: &str, value: &[u8]| {
        let pax = pax(&[(&format!("SCHILY.xattr.{name}"), value)]);
        of(&[root(), pax, entry("root/etc/", b'5', &[], b""), end()])
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("is truncated", Vec::new()),
        ("is truncated", root()),
        ("content is that of", of(&[end()])),
        ("content is that of", of(&[root(), end()])),
        ("content is that of", of(&[root(), file("root/x", b"other"), end()])),
        ("follows its end", of(&[root(), end(), vec![0; 512]])),
        ("not relative and plain", of(&[root(), file("../x", b"x"), end()])),
        (
            "not relative and plain",
            of(&[root(), file("/etc/passwd", b"x"), end()]),
        ),
        ("not relative and plain", of(&[root(), file("root/./x", b"x"), end()])),
        ("not relative and plain", of(&[root(), file("root//x", b"x"), end()])),
        ("not one of a layer", of(&[file("bytes", b"0"), end()])),
        ("not one of a layer", of(&[entry("links/", b'5', &[], b""), end()])),
        ("not one of a layer", of(&[entry("other/", b'5', &[], b""), end()])),
        ("not one of a layer", of(&[link("root", "/"), end()])),
        // Through a link.
        (
            "not in the directory before it",
            of(&[root(), link("root/out", canary_path), file("root/out/x", b"x"), end()]),
        ),
        // A directory again, and a file in place of another.
        ("File exists", of(&[root(), root(), end()])),
        (
            "File exists",
            of(&[root(), file("root/x", b"1"), file("root/x", b"2"), end()]),
        ),
        (
            "File exists",
            of(&[root(), link("root/x", canary_path), file("root/x", b"2"), end()]),
        ),
        // Devices and links.
        ("unknown type", of(&[root(), entry("root/sda", b'4', &[], b""), end()])),
        (
            "not one of a layer",
            of(&[root(), entry("root/null", b'3', &[(329, b"0000001")], b""), end()]),
        ),
        (
            "has no file",
            of(&[root(), entry("root/x", b'1', &[(157, b"/etc/passwd")], b""), end()]),
        ),
        (
            "has no file",
            of(&[
                root(),
                pax(&[("RINGFENCE.link", b"0")]),
                entry("root/x", b'1', &[], b""),
                end(),
            ]),
        ),
        (
            "not in order",
            of(&[root(), pax(&[("RINGFENCE.link", b"7")]), file("root/x", b"x"), end()]),
        ),
        // Owners and attributes.
        (
            "not a user of a sandbox",
            of(&[root(), entry("root/x", b'0', &[(108, b"0200000")], b""), end()]),
        ),
        (
            "attribute that layers do not have",
            attribute("trusted.overlay.redirect", b"/"),
        ),
        ("attribute that layers do not have", attribute("security.selinux", b"x")),
        (
            "attribute that layers do not have",
            attribute("trusted.overlay.opaque", b"x"),
        ),
        (
            "what its type cannot have",
            of(&[
                root(),
                pax(&[("SCHILY.xattr.user.x", b"x")]),
                link("root/l", "x"),
                end(),
            ]),
        ),
        (
            "a name is not one of a layer",
            of(&[pax(&[("SCHILY.xattr.trusted.overlay.opaque", b"y")]), root(), end()]),
        ),
        // What the hash would not see.
        (
            "nothing is below that it could delete",
            of(&[
                root(),
                pax(&[("SCHILY.xattr.trusted.overlay.opaque", b"y")]),
                entry("root/etc/", b'5', &[], b""),
                entry("root/etc/x", b'3', &[], b""),
                end(),
            ]),
        ),
        // Sizes.
        (
            "larger than allowed",
            of(&[root(), file("root/x", &vec![1; 65 << 20]), end()]),
        ),
        ("map of a sparse file", sparse("1\n0\n1000001\n")),
        ("map of a sparse file", sparse("2\n10\n1\n0\n1\n")),
        ("map of a sparse file", sparse("99999999999\n")),
        ("map of a sparse file", sparse("1\n0\n9")),
        ("number is not one", sparse("1\n-1\n2\n")),
        (
            "larger than allowed",
            of(&(0..20_000)
                .map(|n| {
                    if n == 0 {
                        root()
                    } else {
                        file(&format!("root/{n}"), b"")
                    }
                })
                .collect::<Vec<_>>()),
        ),
        (
            "in each other",
            of(&(0..600)
                .map(|depth| {
                    let path = ["root"]
                        .into_iter()
                        .chain(std::iter::repeat_n("d", depth))
                        .collect::<Vec<_>>()
                        .join("/");
                    of(&[
                        pax(&[("path", format!("{path}/").as_bytes())]),
                        entry("root/d/", b'5', &[], b""),
                    ])
                })
                .collect::<Vec<_>>()),
        ),
        (
            "extended header is too large",
            entry("pax", b'x', &[(124, b"77777777777")], b""),
        ),
        (
            "extended header is damaged",
            of(&[entry("pax", b'x', &[], b"999 path=x\n"), root(), end()]),
        ),
        (
            "extended header is unknown",
            of(&[pax(&[("uname", b"x")]), root(), end()]),
        ),
        ("checksum is wrong", {
            let mut bad = root();
            bad[148] ^= 1;
            bad
        }),
    ];
    for (want, tar) in cases {
        let archive = compress_to_vec(tar.as_slice(), CompressionLevel::Uncompressed);
        match unpack(container, &layer, &archive) {
            Err(LayerError::Refused(why)) => assert!(why.contains(want), "{why}, not {want}"),
            Err(LayerError::Failed(error)) => assert!(error.to_string().contains(want), "{error}, not {want}"),
            other => panic!("{want}: {other:?}"),
        }
        assert_eq!(stored(container), [""; 0], "{want}");
    }
    // What is not even compressed, and every kind of damage to one that was good.
    for archive in [
        b"not zstd".to_vec(),
        good[..good.len() - 1].to_vec(),
        [good.as_slice(), b"more"].concat(),
    ] {
        let error = unpack(container, &layer, &archive).unwrap_err();
        assert!(matches!(error, LayerError::Refused(_)), "{error:?}");
    }
    for at in (0..good.len()).step_by(good.len() / 23 + 1) {
        let mut damaged = good.clone();
        damaged[at] ^= 0x10;
        match unpack(container, &layer, &damaged) {
            Err(LayerError::Refused(_) | LayerError::Failed(_)) => assert_eq!(stored(container), [""; 0]),
            // Times are not hashed.
            Ok(_) => fs::remove_dir_all(path_of(container, &layer)).unwrap(),
            Err(other) => panic!("{at}: {other:?}"),
        }
    }
    assert_eq!(fs::read_dir(canary.path()).unwrap().count(), 0);
    let full = UnpackRequest {
        keep_free_bytes: u64::MAX,
        ..request(&layer)
    };
    let error = container
        .storage()
        .unpack_layer(&full, self::file(&good).into(), &|| false)
        .unwrap_err();
    assert!(matches!(error, LayerError::Full(_)), "{error:?}");
    unpack(container, &layer, &good).unwrap();
    assert_eq!(stored(container), [layer.as_str()]);
}

fn transfers_that_stop_leave_nothing(container: &ContainerDriver) {
    let layer = write_layer(container, |root| {
        let mut random = File::open("/dev/urandom").unwrap().take(6 << 20);
        std::io::copy(&mut random, &mut File::create(root.join("etc/passwd")).unwrap()).unwrap();
    });
    let archive = pack(container, &layer);
    // The other end of a pipe is closed, or nothing is read from it.
    let (read, write) = rustix::pipe::pipe().unwrap();
    drop(read);
    let packed = container.storage().pack_layer(&layer, write, &|| false);
    assert!(matches!(packed, Err(LayerError::Failed(_))), "{packed:?}");
    let (read, write) = rustix::pipe::pipe().unwrap();
    let packed = container
        .storage()
        .pack_layer(&layer, write, &|| rustix::io::ioctl_fionread(&read).unwrap() > 0);
    assert!(matches!(packed, Err(LayerError::Failed(_))), "{packed:?}");

    fs::remove_dir_all(path_of(container, &layer)).unwrap();
    // An archive that does not continue is given up when the platform stops.
    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&write, &archive[..1000]).unwrap();
    let begun = || !stored(container).is_empty();
    let unpacked = container.storage().unpack_layer(&request(&layer), read, &begun);
    assert!(matches!(unpacked, Err(LayerError::Failed(_))), "{unpacked:?}");
    assert_eq!(stored(container), [""; 0]);
    unpack(container, &layer, &archive).unwrap();
}
