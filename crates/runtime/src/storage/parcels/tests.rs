//! Parcels between two data directories.

use model::secret::Secret;

use super::*;
use crate::rootfs::Rootfs;
use crate::settings::DriverSettings;

const ABOUT: &str = concat!(
    r#"{"criu":"4.2","kernel":"6.12.0","mounts":[],"agent":""#,
    "0000000000000000000000000000000000000000000000000000000000000000",
    r#""}"#,
);

struct Host {
    dir: tempfile::TempDir,
    storage: Storage,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let settings = DriverSettings {
            base: false,
            ..DriverSettings::new(dir.path().to_owned())
        };
        let storage = Storage::open(&settings).unwrap();
        Self { dir, storage }
    }

    /// The files of disks and of what is kept beside them.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        for below in ["disks", "kept"] {
            for entry in fs::read_dir(self.dir.path().join(below)).unwrap() {
                left.push(entry.unwrap().file_name().to_string_lossy().into_owned());
            }
        }
        left.retain(|name| !name.starts_with("removed."));
        left.sort();
        left
    }
}

fn id() -> SandboxId {
    "ione".parse().unwrap()
}

fn disk(n: u32) -> DiskId {
    n.to_string().parse().unwrap()
}

fn key(byte: &str) -> Secret {
    Secret::new(byte.repeat(32))
}

fn random_file(path: &Path, at: u64, bytes: usize, seed: u8) {
    let mut state = u32::from(seed);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    let content: Vec<u8> = (0..bytes).map(|_| next()).collect();
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .unwrap();
    file.write_all_at(&content, at).unwrap();
}

/// A paused sandbox on disk 1, with its processes.
fn kept() -> Host {
    let host = Host::new();
    let storage = &host.storage;
    let image = storage.disk_path(&disk(1));
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    random_file(&image, 0, 1_200_000, 1);
    random_file(&image, 10 << 20, 9000, 2);
    storage.layers.use_for(&disk(1), &Rootfs::without_base(&[])).unwrap();
    storage.kept.keep(&id(), &disk(1), None).unwrap();
    let checkpoint = storage.kept.unfinished_checkpoint(&id(), &disk(1));
    fs::create_dir(&checkpoint).unwrap();
    fs::write(checkpoint.join("about.json"), ABOUT).unwrap();
    fs::write(checkpoint.join("dump.log"), "of the run that wrote it").unwrap();
    random_file(&checkpoint.join("pages-1.img"), 0, (1 << 20) + 4096, 3);
    storage.kept.finish_checkpoint(&id(), &disk(1)).unwrap();
    storage.kept.mark_saved(&id(), &disk(1)).unwrap();
    host
}

fn pack(host: &Host, known: HashSet<ChunkId>) -> io::Result<Vec<Record>> {
    let request = PackParcel {
        id: id(),
        disk: disk(1),
        parcel: "p1".to_owned(),
        key: key("a1"),
        known,
    };
    let mut records = Vec::new();
    host.storage.pack_parcel(&request, &|| true, &mut |record| {
        records.push(record);
        Ok(())
    })?;
    Ok(records)
}

/// Sends a parcel back: the manifest first.
fn unpack(
    host: &Host,
    mut records: Vec<Record>,
    change: impl FnOnce(&mut UnpackParcel),
) -> Result<Unpacked, LayerError> {
    records.rotate_right(1);
    unpack_as_sent(host, records, change)
}

fn unpack_as_sent(
    host: &Host,
    records: Vec<Record>,
    change: impl FnOnce(&mut UnpackParcel),
) -> Result<Unpacked, LayerError> {
    let mut request = UnpackParcel {
        id: id(),
        disk: disk(2),
        parcel: "p1".to_owned(),
        key: key("a1"),
        with_processes: true,
        keep_free_bytes: 0,
    };
    change(&mut request);
    let mut records = records.into_iter();
    let mut next = || records.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    host.storage.unpack_parcel(&request, &|_| Ok(None), &mut next)
}

#[test]
fn a_parcel_becomes_the_same_sandbox_on_another_node() {
    let (from, to) = (kept(), Host::new());
    let records = pack(&from, HashSet::new()).unwrap();
    let secret = fs::read(from.storage.disk_path(&disk(1))).unwrap()[..64].to_vec();
    for record in &records {
        let (_, content) = record.clone().encode();
        assert!(memchr::memmem::find(&content, &secret).is_none());
    }
    let unpacked = unpack(&to, records, |_| {}).unwrap();
    assert_eq!((unpacked.kept, &unpacked.without_processes), (Kept::Checkpoint, &None));
    assert!(unpacked.bytes > 2 << 20 && unpacked.bytes < 8 << 20, "{unpacked:?}");
    let read = |host: &Host, n| fs::read(host.storage.disk_path(&disk(n))).unwrap();
    assert!(read(&from, 1) == read(&to, 2));
    let checkpoint = |host: &Host, n| host.storage.kept.checkpoint(&id(), &disk(n));
    for file in ["about.json", "pages-1.img"] {
        let read = |directory: std::path::PathBuf| fs::read(directory.join(file)).unwrap();
        assert!(read(checkpoint(&from, 1)) == read(checkpoint(&to, 2)), "{file}");
    }
    assert!(!checkpoint(&to, 2).join("dump.log").exists());
    assert_eq!(to.storage.rootfs_of(&disk(2)).unwrap(), Rootfs::without_base(&[]));
    let found = to.storage.kept().unwrap();
    assert!(found.len() == 1 && found[0].is_saved && found[0].disk == disk(2));
    assert!(to.storage.kept.is_moved(&id(), &disk(2)));
}

#[test]
fn what_an_earlier_parcel_has_is_not_sent_again() {
    let host = kept();
    let first = pack(&host, HashSet::new()).unwrap();
    let chunks = |records: &[Record]| -> HashSet<ChunkId> {
        let chunk = |record: &Record| match record {
            Record::Chunk(id, _) => Some(*id),
            Record::Known(_) | Record::Manifest(_) => None,
        };
        records.iter().filter_map(chunk).collect()
    };
    let known = chunks(&first);
    assert!(chunks(&pack(&host, known.clone()).unwrap()).is_empty());
    random_file(&host.storage.disk_path(&disk(1)), 10 << 20, 10, 9);
    let again = pack(&host, known).unwrap();
    assert_eq!(chunks(&again).len(), 1);
    assert_eq!(again.len(), first.len());
}

#[test]
fn one_that_is_used_again_is_packed_no_further() {
    let host = kept();
    host.storage.kept.mark_used(&id(), &disk(1)).unwrap();
    assert_eq!(
        pack(&host, HashSet::new()).unwrap_err().kind(),
        io::ErrorKind::Interrupted
    );
}

#[test]
fn files_alone_are_kept_where_processes_do_not_fit() {
    let from = kept();
    let records = pack(&from, HashSet::new()).unwrap();
    let to = Host::new();
    let unpacked = unpack(&to, records.clone(), |request| request.with_processes = false).unwrap();
    assert_eq!((unpacked.kept, unpacked.without_processes), (Kept::Filesystem, None));
    let to = Host::new();
    let request = UnpackParcel {
        id: id(),
        disk: disk(2),
        parcel: "p1".to_owned(),
        key: key("a1"),
        with_processes: true,
        keep_free_bytes: 0,
    };
    let mut sent = records;
    sent.rotate_right(1);
    let mut sent = sent.into_iter();
    let mut next = || sent.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    let obstacle = |_: &Path| Ok(Some("another processor".to_owned()));
    let unpacked = to.storage.unpack_parcel(&request, &obstacle, &mut next).unwrap();
    assert_eq!(unpacked.kept, Kept::Filesystem);
    assert_eq!(unpacked.without_processes.as_deref(), Some("another processor"));
    assert!(!to.storage.has_checkpoint(&id(), &disk(2)));
}

#[test]
fn what_was_changed_swapped_or_cut_is_refused_and_nothing_is_left() {
    let from = kept();
    let records = pack(&from, HashSet::new()).unwrap();
    let to = Host::new();
    let before = to.left();
    let refused = |why: &str, change: &dyn Fn(&mut Vec<Record>)| {
        let mut changed = records.clone();
        change(&mut changed);
        let error = unpack(&to, changed, |_| {}).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(why), "{why}: {text}");
        assert_eq!(to.left(), before, "{why}");
    };
    let content = |record: &Record| record.clone().encode().1.to_vec();
    let id_of = |record: &Record| match record {
        Record::Chunk(id, _) => *id,
        Record::Known(_) | Record::Manifest(_) => panic!("no chunk"),
    };
    refused("is not what was stored", &|records| {
        let mut changed = content(&records[2]);
        changed[100] ^= 1;
        records[2] = Record::Chunk(id_of(&records[2]), changed.into());
    });
    refused("is not what was stored", &|records| {
        let cut = content(&records[2])[..500].to_vec();
        records[2] = Record::Chunk(id_of(&records[2]), cut.into());
    });
    // One in the place of another.
    refused("is not what was stored", &|records| {
        let (one, other) = (id_of(&records[1]), content(&records[2]));
        records[1] = Record::Chunk(one, other.into());
    });
    refused("chunks are missing", &|records| {
        records[2] = Record::Known(id_of(&records[2]));
    });
    refused("manifest was changed", &|records| {
        let last = records.len() - 1;
        let mut changed = content(&records[last]);
        changed[30] ^= 1;
        records[last] = Record::Manifest(changed.into());
    });
    // The stream ends early.
    refused("end of file", &|records| {
        records.remove(1);
    });
    // That of another sandbox, of another pause, and one under another key.
    for change in [
        (|request: &mut UnpackParcel| request.id = "itwo".parse().unwrap()) as fn(&mut UnpackParcel),
        |request| request.parcel = "p2".to_owned(),
        |request| request.key = key("b2"),
    ] {
        let error = unpack(&to, records.clone(), change).unwrap_err();
        assert!(error.to_string().contains("manifest was changed"), "{error}");
        assert_eq!(to.left(), before);
    }
    let full = unpack(&to, records.clone(), |request| request.keep_free_bytes = u64::MAX / 2);
    assert!(matches!(full, Err(LayerError::Full(_))));
    let error = unpack_as_sent(&to, records.clone(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("begin with a manifest"), "{error}");
    assert_eq!(to.left(), before);
    // And as it was it is accepted.
    unpack(&to, records, |_| {}).unwrap();
}

#[test]
fn a_layer_that_is_missing_is_named_before_anything_is_sent() {
    let from = kept();
    let layer = model::id::LayerId::from_hash(&[9; 32]);
    let rootfs = Rootfs::without_base(std::slice::from_ref(&layer));
    from.storage.layers.use_for(&disk(1), &rootfs).unwrap();
    let mut records = pack(&from, HashSet::new()).unwrap();
    records.rotate_right(1);
    records.truncate(1);
    let to = Host::new();
    let before = to.left();
    let missing = unpack_as_sent(&to, records, |_| {});
    assert!(matches!(missing, Err(LayerError::NoLayer(named)) if named == layer));
    assert_eq!(to.left(), before);
}

fn of_memory(byte: &str) -> MemoryParcel {
    MemoryParcel {
        build: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
        parcel: "m1".to_owned(),
        key: key(byte),
    }
}

/// The memory of a snapshot on disk 1, made of a paused sandbox.
fn with_memory() -> Host {
    let host = kept();
    let storage = &host.storage;
    let from = storage.kept.path(&id(), &disk(1));
    storage.memories.take(&from, &of_memory("a1").build, &disk(1)).unwrap();
    host
}

fn pack_memory(host: &Host) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    let packed = host
        .storage
        .pack_memory(&of_memory("a1"), &HashSet::new(), &|| true, &mut |record| {
            records.push(record);
            Ok(())
        });
    packed?;
    records.rotate_right(1);
    Ok(records)
}

fn unpack_memory_to(
    n: u32,
    host: &Host,
    records: &[Record],
    key: &str,
    why: Option<&str>,
) -> Result<Result<u64, String>, LayerError> {
    let mut records = records.iter().cloned();
    let mut next = || records.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
    let to = Fork {
        id: "itwo".parse().unwrap(),
        disk: disk(n),
        keep_free_bytes: 0,
    };
    let obstacle = |_: &Path| Ok(why.map(str::to_owned));
    host.storage.unpack_memory(&of_memory(key), &to, &obstacle, &mut next)
}

fn unpack_memory(
    host: &Host,
    records: &[Record],
    key: &str,
    why: Option<&str>,
) -> Result<Result<u64, String>, LayerError> {
    unpack_memory_to(2, host, records, key, why)
}

#[test]
fn a_memory_is_the_same_on_another_node() {
    let (from, to) = (with_memory(), Host::new());
    let records = pack_memory(&from).unwrap();
    let bytes = unpack_memory(&to, &records, "a1", None).unwrap().unwrap();
    assert!(bytes > 2 << 20 && bytes < 8 << 20, "{bytes}");
    let build = of_memory("a1").build;
    let memory = |host: &Host| host.storage.memories.find(&build).unwrap().unwrap();
    let (had, has) = (memory(&from), memory(&to));
    let read = |host: &Host, disk: &DiskId| fs::read(host.storage.disk_path(disk)).unwrap();
    assert!(read(&from, &had.disk) == read(&to, &has.disk));
    for file in ["about.json", "pages-1.img"] {
        let read = |memory: &crate::memories::Memory| fs::read(memory.checkpoint().join(file)).unwrap();
        assert!(read(&had) == read(&has), "{file}");
    }
    assert!(!had.is_moved() && has.is_moved());
    assert!(to.storage.kept().unwrap().is_empty(), "it belongs to no sandbox");
    // The next one has nothing to do, and leaves nothing.
    let before = to.left();
    assert_eq!(unpack_memory_to(4, &to, &records, "a1", None).unwrap(), Ok(bytes));
    assert_eq!(to.left(), before);
    // A copy of it is made ready for this node before it is used.
    let copy = Fork {
        id: id(),
        disk: disk(3),
        keep_free_bytes: 0,
    };
    sums::write(&has.checkpoint(), &crate::cancel::Cancel::new().unwrap()).unwrap();
    to.storage.copy_memory(&build, &copy, &|_| Ok(None), &|| false).unwrap();
    assert!(to.storage.kept.is_moved(&id(), &disk(3)));
}

#[test]
fn a_memory_that_does_not_fit_or_is_not_whole_leaves_nothing() {
    let from = with_memory();
    let records = pack_memory(&from).unwrap();
    let to = Host::new();
    let before = to.left();
    // Only the manifest is needed for that.
    let unfit = unpack_memory(&to, &records[..1], "a1", Some("another processor"));
    assert_eq!(unfit.unwrap(), Err("another processor".to_owned()));
    assert_eq!(to.left(), before);
    for (records, key, why) in [
        (&records[..2], "a1", "end of file"),
        (&records[..], "b2", "manifest was changed"),
    ] {
        let error = unpack_memory(&to, records, key, None).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(to.left(), before, "{why}");
    }
    assert!(to.storage.memories.list().unwrap().is_empty());
}

#[test]
fn a_memory_that_is_removed_meanwhile_is_packed_no_further() {
    let host = with_memory();
    let build = of_memory("a1").build;
    let removed = host
        .storage
        .pack_memory(&of_memory("a1"), &HashSet::new(), &|| true, &mut |_| {
            host.storage.remove_memory(&build)
        });
    assert_eq!(removed.unwrap_err().kind(), io::ErrorKind::Interrupted);
    assert_eq!(pack_memory(&host).unwrap_err().kind(), io::ErrorKind::NotFound);
}
