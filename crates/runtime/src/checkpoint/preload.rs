//! A shared library with functions that CRIU calls in the place of those of the C library.
//!
//! `getuid` and `geteuid` return 0. CRIU refuses to work as any user but root, or works with less. What it makes as root
//! belongs to root, though: the user namespace of a sandbox would be owned by the host's root, and what the kernel counts for
//! each user would be counted for root. So CRIU runs with the first id of the sandbox's range and with all capabilities, and
//! this library is loaded before its own, so that its one check of the user id passes.
//!
//! `socket` gives a socket of the kernel's packet filter that says nothing ([`filters`]), if that is wanted. CRIU asks such
//! a socket for the connections that the filter tracks in the sandbox's network. They are of no use without its rules, which
//! a checkpoint does not have. For the answer the kernel walks through the table of the whole host, twice, which took 20 of the
//! 55 ms of a checkpoint (2^18 buckets, none used).
//!
//! The library is made here, as bytes: it needs no compiler, and is the same on every machine
//! (`docs/decisions/own-preload.md`). Programs that CRIU starts load it as well, and some refuse to work when the two user ids
//! differ.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};

/// Address, and place in the file, of the part that the loader writes to.
const DATA: u64 = 0x1000;
/// Sizes of the structures of `elf.h`.
const HEADER: u64 = 64;
const SEGMENT: u64 = 56;
const SYMBOL: u64 = 24;
const RELOCATION: u64 = 24;

/// The descriptor that [`filters`] belongs to.
pub(super) const FILTERS: i32 = 4;

#[cfg(target_arch = "x86_64")]
mod machine {
    pub(super) const NUMBER: u16 = 62;
    /// `R_X86_64_GLOB_DAT`
    pub(super) const ADDRESS: u64 = 6;
    /// `return 0`
    pub(super) const ZERO: [u8; 8] = [0x31, 0xc0, 0xc3, 0, 0, 0, 0, 0];

    /// `socket`, at an address, where `syscall` is in a word at another one.
    pub(super) fn socket(at: u64, syscall: u64) -> Vec<u8> {
        let mut code = vec![0x83, 0xff, 16]; // cmp edi, AF_NETLINK
        code.extend([0x75, 0x15]); // jne other
        code.extend([0x83, 0xfa, 12]); // cmp edx, NETLINK_NETFILTER
        code.extend([0x75, 0x10]); // jne other
        code.extend([0xbe, 4, 0, 0, 0]); // mov esi, FILTERS
        code.extend([0xbf, 32, 0, 0, 0]); // mov edi, SYS_dup
        jump(&mut code, at, syscall);
        code.extend([0x89, 0xd1, 0x89, 0xf2, 0x89, 0xfe]); // other: mov ecx, edx; mov edx, esi; mov esi, edi
        code.extend([0xbf, 41, 0, 0, 0]); // mov edi, SYS_socket
        jump(&mut code, at, syscall);
        code
    }

    /// `jmp [rip + ...]`
    fn jump(code: &mut Vec<u8>, at: u64, syscall: u64) {
        let next = at + code.len() as u64 + 6;
        code.extend([0xff, 0x25]);
        code.extend(u32::try_from(syscall - next).unwrap_or_default().to_le_bytes());
    }
}

#[cfg(target_arch = "aarch64")]
mod machine {
    pub(super) const NUMBER: u16 = 183;
    /// `R_AARCH64_GLOB_DAT`
    pub(super) const ADDRESS: u64 = 1025;
    /// `return 0`
    pub(super) const ZERO: [u8; 8] = [0x00, 0x00, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6];

    /// `socket`, at an address, where `syscall` is in a word at another one.
    pub(super) fn socket(at: u64, syscall: u64) -> Vec<u8> {
        let load = |index: u64| {
            let words = u32::try_from((syscall - at - index * 4) / 4).unwrap_or_default();
            0x5800_0010 | words << 5 // ldr x16, syscall
        };
        let words: [u32; 14] = [
            0x7100_401f, // cmp w0, AF_NETLINK
            0x5400_00e1, // b.ne other
            0x7100_305f, // cmp w2, NETLINK_NETFILTER
            0x5400_00a1, // b.ne other
            0x5280_0081, // mov w1, FILTERS
            0x5280_02e0, // mov w0, SYS_dup
            load(6),
            0xd61f_0200, // br x16
            0x2a02_03e3, // other: mov w3, w2
            0x2a01_03e2, // mov w2, w1
            0x2a00_03e1, // mov w1, w0
            0x5280_18c0, // mov w0, SYS_socket
            load(12),
            0xd61f_0200, // br x16
        ];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the library that CRIU is started with needs its machine code in `machine` for this architecture");

/// A socket that takes every question and answers none, for [`FILTERS`], and its other end, which has to stay open.
pub(super) fn filters() -> io::Result<(OwnedFd, OwnedFd)> {
    let (end, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::shutdown(&other, Shutdown::Write)?;
    Ok((end, other))
}

/// The library, with `socket` or without it.
pub(super) fn library(with_filters: bool) -> Vec<u8> {
    const NAMES: &[u8] = b"\0geteuid\0getuid\0socket\0syscall\0";
    /// Where each name begins.
    const AT: [u32; 4] = [1, 9, 16, 23];
    const SEGMENTS: u16 = 4;
    const FUNCTIONS: u64 = 64;
    let code = HEADER + SEGMENT * u64::from(SEGMENTS);
    let symbols = code + FUNCTIONS + machine::ZERO.len() as u64;
    let hash = symbols + (1 + AT.len() as u64) * SYMBOL;
    // One bucket, whose chain has the first two symbols, or three.
    let hash_words: [u32; 8] = [1, 5, 1, 0, 2, if with_filters { 3 } else { 0 }, 0, 0];
    let relocations = hash + 4 * hash_words.len() as u64;
    let names = relocations + RELOCATION;
    let end = names + NAMES.len() as u64;

    const DT_HASH: u64 = 4;
    const DT_STRTAB: u64 = 5;
    const DT_SYMTAB: u64 = 6;
    const DT_RELA: u64 = 7;
    const DT_RELASZ: u64 = 8;
    const DT_RELAENT: u64 = 9;
    const DT_STRSZ: u64 = 10;
    const DT_SYMENT: u64 = 11;
    let dynamic: [[u64; 2]; 9] = [
        [DT_HASH, hash],
        [DT_STRTAB, names],
        [DT_SYMTAB, symbols],
        [DT_RELA, relocations],
        [DT_RELASZ, RELOCATION],
        [DT_RELAENT, RELOCATION],
        [DT_STRSZ, NAMES.len() as u64],
        [DT_SYMENT, SYMBOL],
        [0, 0],
    ];
    let dynamic_size = 16 * dynamic.len() as u64;
    let syscall = DATA + dynamic_size;
    let zero = machine::ZERO.len() as u64;
    let socket = machine::socket(code + zero, syscall);

    let mut bytes = Vec::new();
    // 64 bits, little endian, version 1.
    bytes.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    put16(&mut bytes, &[3, machine::NUMBER]); // a shared object
    put32(&mut bytes, &[1]);
    put64(&mut bytes, &[0, HEADER, 0]); // entry, segments, sections
    put32(&mut bytes, &[0]);
    let header = u16::try_from(HEADER).unwrap_or_default();
    let segment = u16::try_from(SEGMENT).unwrap_or_default();
    put16(&mut bytes, &[header, segment, SEGMENTS, 64, 0, 0]);

    const LOAD: u32 = 1;
    const DYNAMIC: u32 = 2;
    const STACK: u32 = 0x6474_e551;
    let (read_execute, read_write) = (5, 6);
    for (kind, flags, at, size, align) in [
        (LOAD, read_execute, 0, end, DATA),
        (LOAD, read_write, DATA, dynamic_size + 8, DATA),
        (DYNAMIC, read_write, DATA, dynamic_size, 8),
        // Without it the loader would make the stack executable.
        (STACK, read_write, 0, 0, 16),
    ] {
        put32(&mut bytes, &[kind, flags]);
        put64(&mut bytes, &[at, at, at, size, size, align]);
    }
    bytes.extend(machine::ZERO);
    bytes.extend(&socket);
    bytes.resize(usize::try_from(symbols).unwrap_or_default(), 0);
    bytes.extend([0; 24]); // the first symbol is none
    for (name, section, at, size) in [
        (AT[0], 1, code, zero),
        (AT[1], 1, code, zero),
        (AT[2], 1, code + zero, socket.len() as u64),
        (AT[3], 0, 0, 0), // of the C library
    ] {
        put32(&mut bytes, &[name]);
        bytes.extend([0x12, 0]); // a global function
        put16(&mut bytes, &[section]);
        put64(&mut bytes, &[at, size]);
    }
    put32(&mut bytes, &hash_words);
    put64(&mut bytes, &[syscall, 4 << 32 | machine::ADDRESS, 0]);
    bytes.extend(NAMES);
    bytes.resize(usize::try_from(DATA).unwrap_or_default(), 0);
    put64(&mut bytes, dynamic.as_flattened());
    put64(&mut bytes, &[0]);
    bytes
}

fn put16(bytes: &mut Vec<u8>, numbers: &[u16]) {
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
}

fn put32(bytes: &mut Vec<u8>, numbers: &[u32]) {
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
}

fn put64(bytes: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn programs_that_load_it_take_themselves_for_root() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("preload.so");
        std::fs::write(&path, library(true)).unwrap();
        let id = |preload: Option<&std::path::Path>, arguments: &[&str]| {
            let mut id = std::process::Command::new("setpriv");
            id.args(["--reuid=1234", "--clear-groups", "id"]).args(arguments);
            preload.map(|path| id.env("LD_PRELOAD", path));
            let output = id.output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stderr), "");
            String::from_utf8(output.stdout).unwrap()
        };
        std::os::unix::fs::chown(dir.path(), Some(1234), None).unwrap();
        for arguments in [&["-u"][..], &["-u", "-r"]] {
            assert_eq!(id(None, arguments), "1234\n");
            assert_eq!(id(Some(&path), arguments), "0\n");
        }
    }

    /// The functions as an assembler reads them, with `syscall` at 0x1000.
    #[cfg(target_arch = "x86_64")]
    const SOURCE: &str = "
        .intel_syntax noprefix
        xor eax, eax
        ret
        .org 8
        cmp edi, 16
        jne other
        cmp edx, 12
        jne other
        mov esi, 4
        mov edi, 32
        jmp qword ptr [rip + syscall]
        other: mov ecx, edx
        mov edx, esi
        mov esi, edi
        mov edi, 41
        jmp qword ptr [rip + syscall]
        end: .org 0x1000
        syscall: .quad 0
    ";
    #[cfg(target_arch = "aarch64")]
    const SOURCE: &str = "
        mov w0, 0
        ret
        cmp w0, 16
        b.ne other
        cmp w2, 12
        b.ne other
        mov w1, 4
        mov w0, 23
        ldr x16, syscall
        br x16
        other: mov w3, w2
        mov w2, w1
        mov w1, w0
        mov w0, 198
        ldr x16, syscall
        br x16
        end: .org 0x1000
        syscall: .quad 0
    ";

    #[test]
    fn the_code_is_what_an_assembler_makes_of_its_source() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("code.s"), SOURCE).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            let mut command = std::process::Command::new(program);
            assert!(
                command.args(arguments).current_dir(&dir).status().unwrap().success(),
                "{program}"
            );
        };
        run("as", &["-o", "code.o", "code.s"]);
        run("objcopy", &["-O", "binary", "-j", ".text", "code.o", "code"]);
        let assembled = std::fs::read(path("code")).unwrap();
        let zero = machine::ZERO.len();
        let expected = [&machine::ZERO[..], &machine::socket(zero as u64, 0x1000)].concat();
        assert_eq!(assembled[..expected.len()], expected[..]);
        assert!(
            assembled[expected.len()..].iter().all(|byte| *byte == 0),
            "nothing is left out"
        );
    }

    #[test]
    fn a_socket_of_the_packet_filter_answers_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("preload.so");
        // Its first line of output: how a question went, and what was answered; its second one: whether others work.
        let script = r#"socket(my $filters, 16, 3, 12) or die; send($filters, "x" x 20, 0) == 20 or die;
            recv($filters, my $answer, 9, 64) // die; print length($answer), "\n";
            socket(my $routes, 16, 3, 0) or die; print unpack("S", getsockname($routes)), "\n";
            socket(my $none, 16, 3, 99) || print $!{EPROTONOSUPPORT} ? "none" : $!, "\n""#;
        let run = |with_filters| {
            std::fs::write(&path, library(with_filters)).unwrap();
            let (end, _other) = filters().unwrap();
            let number = end.as_raw_fd();
            // Not `sh`, which knows descriptors of one digit only.
            let mut perl = std::process::Command::new("bash");
            perl.args([
                "-c",
                &format!("exec 4<&{number}; exec env LD_PRELOAD=$0 timeout 10 perl -MErrno -e \"$1\""),
            ]);
            perl.arg(&path).arg(script);
            rustix::io::fcntl_setfd(&end, rustix::io::FdFlags::empty()).unwrap();
            let output = perl.output().unwrap();
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr)
        };
        assert_eq!(run(true), "0\n16\nnone\n");
        // The kernel's refuses that.
        assert!(!run(false).starts_with("0\n"));
    }
}
