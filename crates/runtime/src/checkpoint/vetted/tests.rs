//! Programs that another user could have chosen are refused, and nothing of them has run by then.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

use tempfile::TempDir;

use super::*;

/// A user who is not root.
const OTHER: u32 = 4321;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory in which only the user of the tests may write.
fn place() -> TempDir {
    let temp = tempfile::tempdir_in("/tmp").unwrap();
    mode(temp.path(), 0o755);
    temp
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn written(path: PathBuf, content: &[u8]) -> PathBuf {
    fs::write(&path, content).unwrap();
    mode(&path, 0o755);
    path
}

/// A program with these segments, at which it is mapped as it is in the file.
fn elf(entry: u64, segments: &[(u32, u64, u64)], rest: &[u8]) -> Vec<u8> {
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [3_u16, 62] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1_u32.to_le_bytes());
    for word in [entry, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0_u32.to_le_bytes());
    for half in [64, 56, u16::try_from(segments.len()).unwrap(), 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    for (kind, begin, size) in segments {
        elf.extend(kind.to_le_bytes());
        elf.extend(7_u32.to_le_bytes());
        for word in [*begin, *begin, *begin, *size, *size, 4096] {
            elf.extend(word.to_le_bytes());
        }
    }
    elf.extend(rest);
    elf
}

/// A loader that makes a file, and ends.
fn trap(mark: &Path) -> Vec<u8> {
    // open(mark, O_WRONLY | O_CREAT, 0777); exit(0)
    let mut code = vec![0xb8, 2, 0, 0, 0, 0x48, 0x8d, 0x3d, 21, 0, 0, 0];
    code.extend([0xbe, 0x41, 0, 0, 0, 0xba, 0xff, 1, 0, 0, 0x0f, 0x05]);
    code.extend([0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05]);
    code.extend(mark.as_os_str().as_bytes());
    code.push(0);
    let size = 120 + u64::try_from(code.len()).unwrap();
    elf(120, &[(1, 0, size)], &code)
}

/// A program that names this loader, and these directories for libraries.
fn program_with(loader: &Path, places: &str) -> Vec<u8> {
    // Three segments: everything, the name of the loader, the dynamic entries. The strings come last.
    const HEAD: u64 = 64 + 3 * 56;
    let name = [loader.as_os_str().as_bytes(), b"\0"].concat();
    let length = u64::try_from(name.len()).unwrap();
    let entries_at = (HEAD + length).next_multiple_of(8);
    let strings_at = entries_at + 3 * 16;
    let mut rest = name;
    rest.resize(usize::try_from(entries_at - HEAD).unwrap(), 0);
    // RUNPATH at offset 1 of the strings, STRTAB, NULL.
    for word in [29, 1, 5, strings_at, 0, 0] {
        rest.extend(word.to_le_bytes());
    }
    rest.push(0);
    rest.extend(places.as_bytes());
    rest.push(0);
    let size = HEAD + u64::try_from(rest.len()).unwrap();
    elf(0, &[(1, 0, size), (3, HEAD, length), (2, entries_at, 48)], &rest)
}

#[test]
fn a_shell_of_the_host_is_roots() {
    let files = program(Path::new("/bin/sh")).unwrap();
    assert!(files.contains(Path::new("/bin/sh")), "{files:?}");
    assert!(
        files.iter().any(|file| file.to_string_lossy().contains("libc.so")),
        "{files:?}"
    );
    assert!(files.iter().all(|file| file.exists()), "{files:?}");
}

#[test]
fn what_a_program_asks_for_is_read() {
    let (loader, places) = (Path::new("/lib/ld.so"), "/opt/a:$ORIGIN/../lib:${ORIGIN}");
    let asked = Asked::parse(&program_with(loader, places), Path::new("/opt/bin")).unwrap();
    assert_eq!(asked.loader.as_deref(), Some(loader));
    assert_eq!(
        asked.places,
        ["/opt/a", "/opt/bin/../lib", "/opt/bin"].map(PathBuf::from)
    );
    for (content, why) in [
        (&b"#!/bin/sh\n"[..], "script"),
        (b"\x7fELF\x01", "64-bit"),
        (b"", "64-bit"),
    ] {
        let temp = place();
        let said = Asked::of(&written(temp.path().join("criu"), content)).unwrap_err();
        assert!(said.contains(why), "{said}");
    }
}

/// The first look at a program once ran its loader.
#[test]
fn a_loader_of_another_user_does_not_run() {
    if !crate::alone::is_alone("checkpoint::vetted::tests::a_loader_of_another_user_does_not_run") {
        return;
    }
    let temp = place();
    let (mark, home) = (temp.path().join("mark"), temp.path().join("home"));
    fs::create_dir(&home).unwrap();
    let loader = written(home.join("ld.so"), &trap(&mark));
    let criu = written(temp.path().join("criu"), &program_with(&loader, "/usr/lib"));
    if !is_root() {
        assert!(program(&criu).unwrap_err().contains("belongs to user"));
        assert!(!mark.exists());
        return;
    }
    mode(&home, 0o777);
    let why = program(&criu).unwrap_err();
    assert!(
        why.contains(home.to_str().unwrap()) && why.contains("chmod go-w"),
        "{why}"
    );
    mode(&home, 0o755);
    chown(&loader, Some(OTHER), None).unwrap();
    let why = program(&criu).unwrap_err();
    assert!(why.contains(loader.to_str().unwrap()) && why.contains("4321"), "{why}");
    assert!(!mark.exists(), "it ran");
    // The trap would have sprung.
    chown(&loader, Some(0), None).unwrap();
    assert_eq!(program(&criu), Ok(BTreeSet::from([criu.clone()])));
    assert!(mark.exists(), "the loader of root did not run");
    fs::remove_file(&mark).unwrap();
    // Directories of libraries: open to others, not there yet in one that is, and relative.
    let open = temp.path().join("open");
    fs::create_dir(&open).unwrap();
    for (bits, places) in [
        (0o777, open.to_str().unwrap()),
        (0o1777, open.to_str().unwrap()),
        (0o777, "$ORIGIN/open/not/there"),
        (0o755, "lib"),
        (0o755, "/usr/lib:"),
    ] {
        mode(&open, bits);
        fs::write(&criu, program_with(&loader, places)).unwrap();
        assert!(program(&criu).is_err(), "{places}");
        assert!(!mark.exists(), "{places}: it ran");
    }
    mode(&open, 0o755);
    fs::write(&criu, program_with(&loader, "$ORIGIN/open/not/there")).unwrap();
    assert!(program(&criu).is_ok());
}

#[test]
fn each_directory_and_link_on_the_way_counts() {
    let temp = place();
    let real = temp.path().join("real");
    fs::create_dir_all(real.join("bin")).unwrap();
    let criu = written(real.join("bin/criu"), b"");
    let links = temp.path().join("links");
    fs::create_dir(&links).unwrap();
    symlink("../real", links.join("relative")).unwrap();
    symlink(&real, links.join("absolute")).unwrap();
    symlink("loop", links.join("loop")).unwrap();
    let ways = ["relative/bin/criu", "absolute/bin/../bin/criu"].map(|way| links.join(way));
    assert!(file(&links.join("loop")).is_err());
    assert!(file(&real.join("bin")).is_err(), "a directory");
    assert!(file(Path::new("bin/criu")).unwrap_err().contains("absolute"));
    if !is_root() {
        assert!(file(&criu).unwrap_err().contains("belongs to user"));
        return;
    }
    for way in &ways {
        assert_eq!(file(way).as_deref(), Ok(&*criu));
    }
    for way in [&links, &real, &real.join("bin"), &criu] {
        for bits in [0o775, 0o757] {
            mode(way, bits);
            assert!(file(&ways[0]).is_err(), "{} with {bits:o}", way.display());
            mode(way, 0o755);
        }
        chown(way, Some(OTHER), None).unwrap();
        assert!(file(&ways[0]).is_err(), "{}", way.display());
        chown(way, Some(0), None).unwrap();
    }
    assert!(file(&ways[0]).is_ok());
    // In a directory such as /tmp, a directory of root is safe, and a file may be a name that another user gave it.
    mode(&real, 0o1777);
    assert!(file(&criu).is_ok());
    mode(&real, 0o755);
    mode(&real.join("bin"), 0o1777);
    assert!(file(&criu).is_err());
}

#[test]
fn a_loader_names_the_files_of_a_program() {
    for (line, want) in [
        ("\tlinux-vdso.so.1 (0x00007ffd)", None),
        (
            "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)",
            Some("/lib/x86_64-linux-gnu/libc.so.6"),
        ),
        (
            "\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)",
            Some("/lib64/ld-linux-x86-64.so.2"),
        ),
        ("\tlibgone.so.1 => not found", None),
        ("\tstatically linked", None),
        ("Version: 4.2", None),
    ] {
        assert_eq!(loaded(line), want.map(PathBuf::from), "{line}");
    }
}
