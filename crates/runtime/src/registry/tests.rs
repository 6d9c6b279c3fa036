use super::*;

fn registry(at: &Path) -> Registry {
    fs::write(at.join("file-max"), "1000\n").unwrap();
    Registry {
        directory: at.join("run/ringfence"),
        file_max: at.join("file-max"),
        processes: at.join("processes"),
    }
}

/// The block for the first slots.
fn first(blocks: &Blocks) -> Block {
    blocks[&0].block
}

/// Ends a platform: nobody has its locks any more. Those of a process are shared by what other tests clone meanwhile,
/// until it executes its program, so dropping them is not enough.
fn end(blocks: &Blocks) {
    blocks
        .values()
        .flat_map(|held| &held.locks)
        .for_each(|lock| unlock(lock));
}

fn unlock(lock: &OwnedFd) {
    rustix::fs::flock(lock, FlockOperation::Unlock).unwrap();
}

/// Claims as an earlier version does.
fn claim_whole(registry: &Registry, region: Region, data_dir: &str) -> OwnedFd {
    let _changing = registry.lock().unwrap();
    locked(&registry.region_entry(region), data_dir.as_bytes()).unwrap()
}

/// Whether an earlier version would take over a region of which no process has ids.
fn is_free_to_earlier_versions(registry: &Registry, region: Region) -> bool {
    let entry = registry.region_entry(region);
    !entry.exists() || is_stale(&entry, false).unwrap()
}

#[test]
fn directories_with_colliding_hashes_get_separate_blocks() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let wanted = Region::of_hash(path_hash(Path::new("/data/0")));
    let collides = (1..)
        .map(|number| PathBuf::from(format!("/data/{number}")))
        .find(|path| Region::of_hash(path_hash(path)) == wanted)
        .unwrap();
    let one = registry.claim(Path::new("/data/0"), true).unwrap();
    let two = registry.claim(&collides, true).unwrap();
    let blocks = (first(&one), first(&two));
    assert_ne!(blocks.0, blocks.1);
    // Both keep their blocks, whatever the order of the next claims.
    drop((one, two));
    let two = registry.claim(&collides, true).unwrap();
    let one = registry.claim(Path::new("/data/0"), true).unwrap();
    assert_eq!((first(&one), first(&two)), blocks);
}

#[test]
fn the_last_release_restores_everything() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let max = || fs::read_to_string(temp.path().join("file-max")).unwrap();
    let one = registry.claim(Path::new("/one"), true).unwrap();
    let another = registry.claim_another(Path::new("/one"), 1).unwrap();
    let two = registry.claim(Path::new("/two"), true).unwrap();
    assert_eq!(max(), i64::MAX.to_string());
    // The launchers of a platform hold its locks, too, and end shortly after the release.
    registry.release(Path::new("/one")).unwrap();
    drop((one, another));
    assert_eq!(max(), i64::MAX.to_string(), "the second still needs it");
    registry.release(Path::new("/two")).unwrap();
    drop(two);
    assert_eq!(max(), "1000");
    assert!(!temp.path().join("run/ringfence").exists());
    registry.claim(Path::new("/one"), true).unwrap();
    // A value set by another program is kept.
    fs::write(temp.path().join("file-max"), "77").unwrap();
    registry.release(Path::new("/one")).unwrap();
    assert_eq!(max(), "77");
}

#[test]
fn blocks_are_taken_over_only_from_platforms_that_are_gone() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let mut running = Vec::new();
    let refused = loop {
        match registry.claim(&PathBuf::from(format!("/data/{}", running.len())), true) {
            Ok(blocks) => running.push(blocks),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
    assert!(refused.to_string().contains("/data/0"), "{refused}");
    let blocks: BTreeSet<Block> = running.iter().map(first).collect();
    assert_eq!(blocks.len(), running.len(), "no block twice");
    assert_eq!(blocks.len(), Block::all().count());
    assert!(registry.claim_another(Path::new("/data/0"), 1).is_err());
    // Who only ends sandboxes needs none.
    assert!(registry.claim(Path::new("/new"), false).unwrap().is_empty());
    let gone = running.pop().unwrap();
    end(&gone);
    let freed = first(&gone);
    assert_eq!(first(&registry.claim(Path::new("/new"), true).unwrap()), freed);
}

#[test]
fn further_blocks_are_found_again_until_they_are_given_back() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let data_dir = Path::new("/with spaces in it");
    let held = registry.claim(data_dir, true).unwrap();
    let had = first(&held);
    let another = registry.claim_another(data_dir, 7).unwrap().block;
    assert_ne!(another, had);
    let blocks = |blocks: &Blocks| {
        blocks
            .iter()
            .map(|(index, held)| (*index, held.block))
            .collect::<Vec<_>>()
    };
    let again = registry.claim(data_dir, true).unwrap();
    assert_eq!(blocks(&again), [(0, had), (7, another)]);
    registry.give_back(another).unwrap();
    assert_eq!(blocks(&registry.claim(data_dir, true).unwrap()), [(0, had)]);
    assert_eq!(registry.claim_another(Path::new("/other"), 0).unwrap().block, another);
}

#[test]
fn a_region_is_not_free_to_earlier_versions_while_one_of_those_that_share_it_runs() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let one = registry.claim(Path::new("/one"), true).unwrap();
    let two = registry.claim(Path::new("/two"), true).unwrap();
    let region = first(&one).region();
    assert_eq!(first(&two).region(), region, "shared before another one is begun");
    let content = fs::read_to_string(registry.region_entry(region)).unwrap();
    assert!(
        !content.starts_with('/'),
        "no data directory of an earlier version is called so"
    );
    assert!(!is_free_to_earlier_versions(&registry, region));
    end(&one);
    assert!(!is_free_to_earlier_versions(&registry, region));
    end(&two);
    assert!(is_free_to_earlier_versions(&registry, region));
    // One that has taken it over has it as a whole, and entries of its blocks are void.
    fs::remove_file(registry.region_entry(region)).unwrap();
    let _whole = claim_whole(&registry, region, "/earlier");
    let one = registry.claim(Path::new("/one"), true).unwrap();
    assert_ne!(first(&one).region(), region);
    assert!(registry.region_holder(region) == Some(Holder::Whole("/earlier".into())));
}

#[test]
fn what_earlier_versions_have_is_never_shared_while_they_run() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let mut whole: Vec<OwnedFd> = Region::all()
        .map(|region| claim_whole(&registry, region, &format!("/earlier/{region}")))
        .collect();
    let refused = registry.claim(Path::new("/new"), true).unwrap_err().to_string();
    assert!(refused.contains("/earlier/12"), "{refused}");
    unlock(&whole.pop().unwrap());
    let taken = first(&registry.claim(Path::new("/new"), true).unwrap()).region();
    assert_eq!(Some(taken), Region::all().last());
}

#[test]
fn a_region_of_an_earlier_version_is_kept_while_it_is_locked_and_given_up_afterwards() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let region = Region::all().nth(3).unwrap();
    let lock = claim_whole(&registry, region, "/one");
    let blocks = registry.claim(Path::new("/one"), true).unwrap();
    assert!(blocks.values().map(|held| held.block).eq(region.blocks()));
    assert!(blocks.values().all(|held| held.is_of_whole_region));
    // Nobody runs, and no process has its ids.
    unlock(&lock);
    end(&blocks);
    let blocks = registry.claim(Path::new("/one"), true).unwrap();
    assert_eq!(blocks.len(), 1);
    assert!(!blocks[&0].is_of_whole_region);
}

#[test]
fn ids_of_processes_are_not_given_to_others() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let process = temp.path().join("processes/42");
    fs::create_dir_all(&process).unwrap();
    let has = |block: Block| fs::write(process.join("uid_map"), format!("0 {} 65536\n", block.ids().start)).unwrap();
    // A sandbox of an earlier version keeps the whole region for its data directory, and for no other.
    let region = Region::of_hash(path_hash(Path::new("/new")));
    has(region.blocks().nth(2).unwrap());
    unlock(&claim_whole(&registry, region, "/earlier"));
    assert_ne!(
        first(&registry.claim(Path::new("/new"), true).unwrap()).region(),
        region
    );
    let blocks = registry.claim(Path::new("/earlier"), true).unwrap();
    assert!(blocks.values().all(|held| held.is_of_whole_region));
    // Without an entry nobody knows how much of the region is taken.
    fs::remove_file(registry.region_entry(region)).unwrap();
    registry.release(Path::new("/new")).unwrap();
    assert_ne!(
        first(&registry.claim(Path::new("/new"), true).unwrap()).region(),
        region
    );
    // A block whose platform is gone, while one of its sandboxes is not.
    let block = first(&registry.claim(Path::new("/gone"), true).unwrap());
    has(block);
    registry.release(Path::new("/new")).unwrap();
    assert_ne!(first(&registry.claim(Path::new("/other"), true).unwrap()), block);
    assert_eq!(first(&registry.claim(Path::new("/gone"), true).unwrap()), block);
}

#[test]
fn concurrent_claims_get_different_blocks() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let claims: Vec<Blocks> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..4)
            .map(|number| {
                let registry = &registry;
                scope.spawn(move || registry.claim(&PathBuf::from(format!("/at-once/{number}")), true))
            })
            .collect();
        starts.into_iter().map(|start| start.join().unwrap().unwrap()).collect()
    });
    let blocks: BTreeSet<Block> = claims.iter().map(first).collect();
    assert_eq!(blocks.len(), claims.len());
}

#[test]
fn an_empty_entry_is_taken_over() {
    let temp = tempfile::tempdir().unwrap();
    let registry = registry(temp.path());
    let held = registry.claim(Path::new("/one"), true).unwrap();
    let block = first(&held);
    // A child that another test starts has the locked files open, too, until it executes its program.
    end(&held);
    fs::write(registry.block_entry(block), "").unwrap();
    assert_eq!(first(&registry.claim(Path::new("/one"), true).unwrap()), block);
    fs::write(registry.region_entry(block.region()), "").unwrap();
    registry.claim(Path::new("/one"), true).unwrap();
}

#[test]
fn used_blocks_are_read_from_id_maps() {
    let blocks = |map: &str| blocks_of_map(map).collect::<Vec<_>>();
    let first = Block::all().next().unwrap();
    let base = first.ids().start;
    assert_eq!(blocks("         0          0 4294967295\n"), []);
    assert_eq!(blocks("0 100000 65536\n"), []);
    assert_eq!(blocks(&format!("0 {base} 65536\n")), [first]);
    assert_eq!(blocks(&format!("0 {} 65536\n", first.ids().end - 65536)), [first]);
    assert_eq!(blocks(&format!("0 {} 65537\n", first.ids().end - 65536)).len(), 2);
    assert_eq!(blocks(&format!("0 {} 1\n", base - 1)), []);
    assert_eq!(blocks(&format!("0 {} 2\n", base - 1)), [first]);
    assert_eq!(blocks("0 1000000 4100000000\n").len(), Block::all().count());
    assert_eq!(blocks("garbage\n1 2\n"), []);
}
