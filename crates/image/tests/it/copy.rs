//! COPY steps, compared with the reference.

use std::os::unix::fs::symlink as link;

use image::Program;
use protocol::image::{CopyJob, CopyReport, Progress};

use crate::archive::{Member, dir, file, gzip, hard_link, symlink, tar};
use crate::{Root, run};

const PASSWD: &str =
    "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1001::/home/user:/bin/sh\n1234:x:77:78::/x:/bin/sh\n";
const GROUP: &str = "root:x:0:\nuser:x:1001:\nstaff:x:50:\n1234:x:79:\n";

fn root() -> Root {
    let root = Root::new();
    root.write("etc/passwd", PASSWD);
    root.write("etc/group", GROUP);
    root
}

fn job(root: &Root, archive: &[u8], source: &str, dest: &str) -> CopyJob {
    std::fs::write(root.beside("archive"), archive).unwrap();
    CopyJob {
        archive: root.beside("archive"),
        from: None,
        source: source.to_owned(),
        patterns: Vec::new(),
        dest: dest.to_owned(),
        workdir: None,
        user: "user".to_owned(),
        owner: None,
        mode: None,
        limits: Default::default(),
        root: root.path(),
        work: root.work(),
        consume: false,
    }
}

fn copy(job: &CopyJob) -> Result<CopyReport, String> {
    let done = run(Program::Copy, job);
    let left = std::fs::read_dir(&job.work).unwrap().count();
    assert_eq!(left, 0, "nothing is left behind");
    done.map(|progress| match progress {
        Progress::Copied(report) => report,
        other => panic!("{other:?}"),
    })
}

fn context() -> Vec<Member> {
    vec![
        dir("src"),
        file("src/a.txt", "a").mode(0o640),
        file("src/.hidden", "h"),
        dir("src/sub").mode(0o700),
        file("src/sub/b.sh", "b").mode(0o755),
        symlink("src/link", "../outside"),
        file("f.txt", "f"),
    ]
}

#[test]
fn a_file_gets_to_each_kind_of_destination() {
    for (dest, workdir, expect) in [
        ("/app/", None, "app/f.txt"),
        ("/app", None, "app"),
        ("/app/.", None, "app/f.txt"),
        ("/existing", None, "existing/f.txt"),
        ("/linked", None, "existing/f.txt"),
        ("x/y/new.txt", None, "home/user/x/y/new.txt"),
        ("new.txt", Some("/work"), "work/new.txt"),
        (".", Some("/work"), "work/f.txt"),
        ("../up/", Some("/work/deep"), "work/up/f.txt"),
        ("", Some("/work"), "work/f.txt"),
    ] {
        let root = root();
        std::fs::create_dir(root.path().join("existing")).unwrap();
        link("/existing", root.path().join("linked")).unwrap();
        let job = CopyJob {
            workdir: workdir.map(str::to_owned),
            ..job(&root, &gzip(&tar(&context())), "f.txt", dest)
        };
        let report = copy(&job).unwrap();
        assert_eq!(root.read(expect), "f", "{dest}");
        assert_eq!(root.state(expect), "f 644 1000:1001", "{dest}");
        assert_eq!(report.bytes, 1);
        assert_eq!(root.state("existing"), "d 755 0:0", "{dest}");
    }
}

#[test]
fn contents_of_a_directory_are_merged() {
    let root = root();
    // As with a merged /usr: a link to a directory is followed, links to files are replaced.
    root.write("usr/lib/old", "old");
    link("usr/lib", root.path().join("lib")).unwrap();
    root.write("target", "kept");
    link("/target", root.path().join("usr/lib/a.txt")).unwrap();
    std::fs::create_dir(root.path().join("usr/lib/sub")).unwrap();
    root.write("usr/lib/sub/b.sh", "before");
    copy(&job(&root, &tar(&context()), "src", "/lib")).unwrap();
    assert_eq!(root.read("usr/lib/a.txt"), "a");
    assert_eq!(root.read("target"), "kept");
    assert_eq!(root.read("usr/lib/old"), "old");
    assert_eq!(root.read("usr/lib/sub/b.sh"), "b");
    assert_eq!(root.read("usr/lib/.hidden"), "h");
    assert_eq!(root.state("usr/lib/a.txt"), "f 640 1000:1001");
    assert_eq!(
        root.state("usr/lib/sub"),
        "d 755 0:0",
        "metadata of existing directories are kept"
    );
    assert_eq!(root.state("usr/lib/link"), "l 777 1000:1001");
    assert_eq!(root.state("lib"), "l 777 0:0");
}

#[test]
fn made_directories_belong_to_the_owner() {
    let root = root();
    copy(&job(&root, &tar(&context()), "src", "/opt/app")).unwrap();
    for (path, expect) in [
        ("opt", "d 755 1000:1001"),
        ("opt/app", "d 755 1000:1001"),
        ("opt/app/sub", "d 700 1000:1001"),
        ("opt/app/sub/b.sh", "f 755 1000:1001"),
    ] {
        assert_eq!(root.state(path), expect, "{path}");
    }
}

#[test]
fn owners_and_modes_are_applied() {
    for (owner, mode, dir_state, file_state) in [
        (Some("staff"), None, "", ""),
        (Some("root"), None, "d 700 0:0", "f 755 0:0"),
        (Some("user:staff"), Some("0777"), "d 777 1000:50", "f 777 1000:50"),
        (Some("1234"), Some("0600"), "d 600 77:79", "f 600 77:79"),
        (Some("55:66"), Some(""), "d 700 55:66", "f 755 55:66"),
        (Some(""), Some("4755"), "d 4755 1000:1001", "f 4755 1000:1001"),
    ] {
        let root = root();
        let job = CopyJob {
            owner: owner.map(str::to_owned),
            mode: mode.map(str::to_owned),
            ..job(&root, &tar(&context()), "src", "/d")
        };
        if dir_state.is_empty() {
            let error = copy(&job).unwrap_err();
            assert!(error.contains("unknown user \"staff\""), "{error}");
            assert_eq!(root.state("d"), "missing");
            continue;
        }
        copy(&job).unwrap();
        assert_eq!(root.state("d/sub"), dir_state, "{owner:?}");
        assert_eq!(root.state("d/sub/b.sh"), file_state, "{owner:?}");
        assert!(root.state("d/link").starts_with("l 777 "));
        // It is not copied, and has to let its files be reached.
        assert!(root.state("d").starts_with("d 755 "), "{owner:?}");
    }
}

#[test]
fn sources_are_paths_or_patterns() {
    for (source, expect) in [
        (".", vec!["f.txt", "src"]),
        ("*.txt", vec!["f.txt", "src"]),
        ("src/*.txt", vec![".hidden", "a.txt", "link", "sub"]),
        ("./src/sub/", vec!["b.sh"]),
        ("src/**/x", vec![".hidden", "a.txt", "link", "sub"]),
        ("[id]/x", vec!["f.txt", "src"]),
    ] {
        let root = root();
        copy(&job(&root, &tar(&context()), source, "/d")).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(root.path().join("d"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, expect, "{source}");
    }
    // A name that looks like a pattern, and exists.
    let root = root();
    copy(&job(&root, &tar(&[file("[id].ts", "page")]), "[id].ts", "/page.ts")).unwrap();
    assert_eq!(root.read("page.ts"), "page");
    for source in ["none", "src/none", "../x", "f.txt/x"] {
        let error = copy(&job(&root, &tar(&context()), source, "/d")).unwrap_err();
        assert!(error.contains(source), "{error}");
    }
}

#[test]
fn a_link_is_copied_as_a_link() {
    let root = root();
    copy(&job(&root, &tar(&context()), "src/link", "/l")).unwrap();
    assert_eq!(
        std::fs::read_link(root.path().join("l")).unwrap().to_str(),
        Some("../outside")
    );
    assert_eq!(root.state("l"), "l 777 1000:1001");
}

#[test]
fn scratch_images_have_no_users() {
    let root = Root::new();
    for user in ["root", "0"] {
        let job = CopyJob {
            user: user.to_owned(),
            ..job(&root, &tar(&context()), "f.txt", "/bin/")
        };
        copy(&job).unwrap();
        assert_eq!(root.state("bin/f.txt"), "f 644 0:0");
    }
    let error = copy(&job(&root, &tar(&context()), "f.txt", "/bin/")).unwrap_err();
    assert!(error.contains("unknown user \"user\""), "{error}");
}

#[test]
fn hard_links_to_one_file_may_meet_in_one_place() {
    let root = root();
    std::fs::create_dir(root.path().join("y")).unwrap();
    link("y", root.path().join("x")).unwrap();
    let members = [
        dir("x"),
        dir("y"),
        file("x/f", "1"),
        hard_link("y/f", "x/f"),
        hard_link("y/g", "x/f"),
    ];
    copy(&job(&root, &tar(&members), ".", "/")).unwrap();
    assert_eq!(root.read("y/f"), "1");
    assert_eq!(root.read("y/g"), "1");
}

#[test]
fn directories_are_not_replaced_by_files() {
    let root = root();
    root.write("d/a.txt/x", "x");
    let error = copy(&job(&root, &tar(&context()), "src", "/d")).unwrap_err();
    assert!(error.contains("/d/a.txt: a directory is in the way"), "{error}");
    // The other way round the file gives way.
    root.write("e/sub", "file");
    copy(&job(&root, &tar(&context()), "src", "/e")).unwrap();
    assert_eq!(root.read("e/sub/b.sh"), "b");
}

#[test]
fn files_get_to_other_file_systems() {
    // The disk of the template `base` is two overlays.
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let root = root();
    let job = CopyJob {
        work: other.path().to_owned(),
        ..job(&root, &tar(&context()), "src", "/d")
    };
    copy(&job).unwrap();
    assert_eq!(root.state("d/sub/b.sh"), "f 755 1000:1001");
    assert_eq!(root.state("d/link"), "l 777 1000:1001");
    assert_eq!(root.read("d/sub/b.sh"), "b");
}

#[test]
fn many_files_in_one_directory() {
    let root = root();
    let members: Vec<Member> = (0..3000).map(|number| file(&format!("many/{number}"), "x")).collect();
    let report = copy(&job(&root, &gzip(&tar(&members)), "many", "/many")).unwrap();
    assert_eq!(report.bytes, 3000);
    assert_eq!(std::fs::read_dir(root.path().join("many")).unwrap().count(), 3000);
}

/// A job that copies from another file system.
fn from(root: &Root, from: &Root, patterns: &[&str], dest: &str) -> CopyJob {
    CopyJob {
        from: Some(from.path()),
        patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
        ..job(root, b"", "", dest)
    }
}

#[test]
fn patterns_choose_from_an_archive() {
    let root = root();
    let choose = |patterns: &[&str], dest: &str| {
        copy(&CopyJob {
            patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
            owner: Some("0:0".to_owned()),
            ..job(&root, &tar(&context()), "", dest)
        })
    };
    choose(&["src/*.txt", "f.txt"], "/one/").unwrap();
    assert_eq!(root.state("one/a.txt"), "f 640 0:0");
    assert_eq!(root.read("one/f.txt"), "f");
    assert!(!root.path().join("one/sub").exists());
    // The contents of a directory, also of one that a pattern matched.
    choose(&["s*/su[a-c]"], "/two").unwrap();
    assert_eq!(root.read("two/b.sh"), "b");
    choose(&["."], "/three").unwrap();
    assert_eq!(root.read("three/src/sub/b.sh"), "b");
    for (patterns, dest, want) in [
        (&["none"][..], "/x", "not in the uploaded files"),
        (&["f.txt", "*.none"], "/x/", "not in the uploaded files"),
        (&["src/[as]*"], "/x", "write /x/"),
        (&["../f.txt"], "/x", "leads out"),
        (&["src/../../f.txt"], "/x", "leads out"),
        (&["src/link"], "/x", "a link that leads out of the uploaded files"),
        (&["src/*"], "/x/", "a link that leads out of the uploaded files"),
    ] {
        let error = choose(patterns, dest).unwrap_err();
        assert!(error.contains(want), "{patterns:?}: {error}");
    }
}

#[test]
fn paths_are_cleaned_and_links_to_sources_are_followed() {
    let root = root();
    let archive = tar(&[
        dir("app"),
        dir("app/deep"),
        file("app/deep/main", "m"),
        symlink("app/inner", "deep/main"),
        symlink("to-app", "app"),
        symlink("to-file", "./app/deep/main"),
        symlink("out", "/etc"),
        symlink("up", "../passwd"),
        file("f.txt", "f"),
    ]);
    let choose = |patterns: &[&str], dest: &str| {
        copy(&CopyJob {
            patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
            owner: Some("0:0".to_owned()),
            ..job(&root, &archive, "", dest)
        })
    };
    choose(&["./app/../f.txt"], "/one").unwrap();
    choose(&["none/../app/deep/../deep"], "/two").unwrap();
    assert_eq!(
        (root.read("one"), root.read("two/main")),
        ("f".to_owned(), "m".to_owned())
    );
    // The contents of the directory, in which links stay links.
    choose(&["to-app", "app"], "/three/").unwrap();
    assert_eq!(
        (root.read("three/deep/main"), root.state("three/deep")),
        ("m".to_owned(), "d 755 0:0".to_owned())
    );
    assert_eq!(root.state("three/inner"), "l 777 0:0");
    choose(&["app/deep/main", "to-f*", "to-app/deep/main"], "/four/").unwrap();
    assert_eq!(
        (root.state("four/to-file"), root.read("four/main")),
        ("f 644 0:0".to_owned(), "m".to_owned())
    );
    // One source may be part of another one.
    choose(&["app", "app/deep/main", "app", "f.txt"], "/overlapping/").unwrap();
    for path in ["overlapping/main", "overlapping/deep/main"] {
        assert_eq!(root.read(path), "m", "{path}");
    }
    for outside in ["out", "up", "out/passwd"] {
        assert!(choose(&[outside], "/x").is_err(), "{outside}");
        assert!(!root.path().join("x").exists());
    }
    // Steps of an SDK name their sources the same way, and keep links.
    copy(&job(&root, &archive, "app/../f.txt", "/five")).unwrap();
    assert_eq!(root.read("five"), "f");
}

#[test]
fn another_file_system_keeps_its_files() {
    let (root, other) = (root(), Root::new());
    other.write("app/bin/tool", "tool");
    other.write("app/secret", "s");
    std::os::unix::fs::chown(other.path().join("app/secret"), Some(7), Some(8)).unwrap();
    std::fs::set_permissions(
        other.path().join("app/secret"),
        std::os::unix::fs::PermissionsExt::from_mode(0o4750),
    )
    .unwrap();
    link("/app/bin", other.path().join("usr-bin")).unwrap();
    link("secret", other.path().join("app/link")).unwrap();
    // Out of the file system, if anybody followed it.
    link("../../../../../../etc/passwd", other.path().join("app/out")).unwrap();
    let report = copy(&from(&root, &other, &["/app"], "/copied")).unwrap();
    assert_eq!(report.bytes, 5);
    assert_eq!(root.read("copied/bin/tool"), "tool");
    assert_eq!(root.state("copied/secret"), "f 4750 7:8");
    assert_eq!(
        std::fs::read_link(root.path().join("copied/link")).unwrap(),
        std::path::Path::new("secret")
    );
    assert_eq!(root.state("copied"), "d 755 0:0");
    assert_eq!(other.read("app/bin/tool"), "tool", "nothing was moved");
    // Links to the source are followed within the file system.
    copy(&from(
        &root,
        &other,
        &["usr-bin/t*", "/../none/../app/link"],
        "/linked/",
    ))
    .unwrap();
    assert_eq!(root.read("linked/tool"), "tool");
    assert_eq!(root.read("linked/link"), "s");
    let owned = CopyJob {
        owner: Some("user".to_owned()),
        mode: Some("0600".to_owned()),
        ..from(&root, &other, &["app/secret"], "/mine")
    };
    copy(&owned).unwrap();
    assert_eq!(root.state("mine"), "f 600 1000:1001");
    for (patterns, want) in [(&["app/out"][..], "does not exist"), (&["none/*"], "does not exist")] {
        let error = copy(&from(&root, &other, patterns, "/x/")).unwrap_err();
        assert!(error.contains(want), "{patterns:?}: {error}");
    }
}

#[test]
fn a_copy_stays_within_both_file_systems() {
    let (root, other) = (root(), Root::new());
    other.write("dir/file", "content");
    // Directories of the destination that are links lead to its own directories.
    let outside = root.beside("outside");
    std::fs::create_dir(&outside).unwrap();
    link(&outside, root.path().join("trap")).unwrap();
    assert!(copy(&from(&root, &other, &["dir"], "/trap/below")).is_err());
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    // A link in the way of a file is replaced, not followed.
    root.write("victim", "kept");
    link("/victim", root.path().join("file")).unwrap();
    copy(&from(&root, &other, &["dir/file"], "/")).unwrap();
    assert_eq!(
        (root.read("victim"), root.read("file")),
        ("kept".to_owned(), "content".to_owned())
    );
    let limited = CopyJob {
        limits: protocol::image::UnpackLimits { bytes: 3, entries: 10 },
        ..from(&root, &other, &["dir/file"], "/large")
    };
    assert!(copy(&limited).unwrap_err().contains("too large"));
}
