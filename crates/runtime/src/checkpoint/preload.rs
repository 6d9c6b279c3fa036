//! A shared library with two functions, `getuid` and `geteuid`, which return 0.
//!
//! CRIU refuses to work as any user but root, or works with less. What it makes as root belongs to root, though: the
//! user namespace of a sandbox would be owned by the host's root, and what the kernel counts for each user would be
//! counted for root. So CRIU runs with the first id of the sandbox's range and with all capabilities, and this library is
//! loaded before its own, so that its one check of the user id passes.
//!
//! The library is made here, as bytes: it needs no compiler, and is the same on every machine. Programs that CRIU starts load it as well, and some refuse to work when the two differ.

/// Address, and place in the file, of the part that the loader writes to.
const DATA: u64 = 0x1000;
/// Sizes of the structures of `elf.h`.
const HEADER: u64 = 64;
const SEGMENT: u64 = 56;
const SYMBOL: u64 = 24;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// `return 0`.
#[cfg(target_arch = "x86_64")]
const CODE: [u8; 8] = [0x31, 0xc0, 0xc3, 0, 0, 0, 0, 0];
#[cfg(target_arch = "aarch64")]
const CODE: [u8; 8] = [0x00, 0x00, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6];

/// The library.
pub(super) fn library() -> Vec<u8> {
    const NAMES: &[u8] = b"\0geteuid\0getuid\0";
    /// Where each name begins.
    const AT: [u32; 2] = [1, 9];
    const SEGMENTS: u16 = 4;
    let code = HEADER + SEGMENT * u64::from(SEGMENTS);
    let symbols = code + CODE.len() as u64;
    let hash = symbols + (1 + AT.len() as u64) * SYMBOL;
    // One bucket, whose chain has both symbols.
    let hash_words: [u32; 6] = [1, 3, 1, 0, 2, 0];
    let names = hash + 4 * hash_words.len() as u64;
    let end = names + NAMES.len() as u64;

    const DT_HASH: u64 = 4;
    const DT_STRTAB: u64 = 5;
    const DT_SYMTAB: u64 = 6;
    const DT_STRSZ: u64 = 10;
    const DT_SYMENT: u64 = 11;
    let dynamic: [u64; 12] = [
        DT_HASH,
        hash,
        DT_STRTAB,
        names,
        DT_SYMTAB,
        symbols,
        DT_STRSZ,
        NAMES.len() as u64,
        DT_SYMENT,
        SYMBOL,
        0,
        0,
    ];
    let dynamic_size = 8 * dynamic.len() as u64;

    let mut bytes = Vec::new();
    // 64 bits, little endian, version 1.
    bytes.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    put16(&mut bytes, &[3, MACHINE]); // a shared object
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
        (LOAD, read_write, DATA, dynamic_size, DATA),
        (DYNAMIC, read_write, DATA, dynamic_size, 8),
        // Without it the loader would make the stack executable.
        (STACK, read_write, 0, 0, 16),
    ] {
        put32(&mut bytes, &[kind, flags]);
        put64(&mut bytes, &[at, at, at, size, size, align]);
    }
    bytes.extend(CODE);
    bytes.extend([0; 24]); // the first symbol is none
    for name in AT {
        put32(&mut bytes, &[name]);
        bytes.extend([0x12, 0]); // a global function
        put16(&mut bytes, &[1]); // defined
        put64(&mut bytes, &[code, CODE.len() as u64]);
    }
    put32(&mut bytes, &hash_words);
    bytes.extend(NAMES);
    bytes.resize(usize::try_from(DATA).unwrap_or_default(), 0);
    put64(&mut bytes, &dynamic);
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
    use super::*;

    #[test]
    fn programs_that_load_it_take_themselves_for_root() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("preload.so");
        std::fs::write(&path, library()).unwrap();
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
}
