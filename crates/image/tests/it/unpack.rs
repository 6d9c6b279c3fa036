//! Images in files.

use image::Program;
use protocol::image::{ImageReport, Progress, UnpackJob};
use serde_json::json;
use sha2::Digest;

use crate::archive::{Member, dir, file, gzip, hard_link, member, symlink, tar, zstd};
use crate::hostile::{self, LIMITS};
use crate::{Root, run};

fn job(root: &Root, archive: &[u8]) -> UnpackJob {
    std::fs::write(root.beside("archive"), archive).unwrap();
    UnpackJob {
        archive: root.beside("archive"),
        target: root.path(),
        work: root.work(),
        reference: None,
        arch: Some("amd64".to_owned()),
        limits: LIMITS,
    }
}

fn unpack(job: &UnpackJob) -> Result<ImageReport, String> {
    let done = run(Program::Unpack, job);
    assert_eq!(
        std::fs::read_dir(&job.work).unwrap().count(),
        0,
        "nothing is left behind"
    );
    done.map(|progress| match progress {
        Progress::Unpacked(report) => report,
        other => panic!("{other:?}"),
    })
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    let hash = sha2::Sha256::digest(bytes);
    format!(
        "sha256:{}",
        hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    )
}

fn bytes_of(path: &str, data: &[u8]) -> Member {
    Member {
        data: data.to_vec(),
        ..file(path, "")
    }
}

pub(crate) fn config(arch: &str) -> Vec<u8> {
    json!({
        "architecture": arch, "os": "linux",
        "config": {"Env": ["PATH=/bin", "EMPTY=", "=x", "none"], "User": "1000", "WorkingDir": "/w",
            "Entrypoint": ["/e"], "Cmd": null},
        "rootfs": {"type": "layers", "diff_ids": []},
    })
    .to_string()
    .into_bytes()
}

/// Layers with everything that a layer can have.
pub(crate) fn layers() -> Vec<Vec<u8>> {
    let first = tar(&[
        dir("./"),
        dir("usr/"),
        dir("usr/bin"),
        symlink("bin", "usr/bin"),
        file("bin/tool", "tool").mode(0o4755),
        file("gone", "x"),
        dir("opaque"),
        file("opaque/old", "x"),
        dir("replaced"),
        file("replaced/x", "x"),
        file("owned", "x").owner(1234, 5678).mode(0o640),
        hard_link("hard", "owned"),
        file("swap", "1"),
        file("attributes", "x")
            .pax("SCHILY.xattr.user.test", b"value")
            .pax("SCHILY.xattr.trusted.overlay.opaque", b"y"),
    ]);
    let second = tar(&[
        // Deletions come last on purpose: their order has no meaning.
        file("opaque/new", "new"),
        file("gone2", "x"),
        member(b'0', "opaque/.wh..wh..opq"),
        member(b'0', ".wh.gone"),
        member(b'0', ".wh.gone2"),
        member(b'0', "bin/.wh.tool"),
        file("replaced", "now a file"),
        dir("swap"),
        member(b'3', "dev/null"),
    ]);
    let third = tar(&[file("last", "3"), member(b'0', "usr/bin/.wh.none")]);
    vec![gzip(&first), zstd(&second), third]
}

pub(crate) fn check(root: &Root) {
    for (path, expect) in [
        ("bin", "l 777 0:0"),
        // The deletion is behind a link, so it names something else.
        ("usr/bin/tool", "f 4755 0:0"),
        ("gone", "missing"),
        ("gone2", "f 644 0:0"),
        ("opaque/old", "missing"),
        ("opaque/new", "f 644 0:0"),
        ("replaced", "f 644 0:0"),
        ("owned", "f 640 1234:5678"),
        ("hard", "f 640 1234:5678"),
        ("swap", "d 755 0:0"),
        ("last", "f 644 0:0"),
        ("dev/null", "missing"),
    ] {
        assert_eq!(root.state(path), expect, "{path}");
    }
    let listing = root.listing();
    assert!(listing.iter().all(|line| !line.contains(".wh.")), "{listing:?}");
}

pub(crate) fn check_report(report: &ImageReport) {
    assert_eq!(report.arch.as_deref(), Some("amd64"));
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(report.env, [pair("PATH", "/bin"), pair("EMPTY", "")]);
    assert_eq!(report.user.as_deref(), Some("1000"));
    assert_eq!(report.workdir.as_deref(), Some("/w"));
    assert_eq!((report.entrypoint.len(), report.cmd.len()), (1, 0));
    assert_eq!(report.layers.len(), 3);
    assert_eq!(report.skipped.devices, 1);
    assert_eq!(report.skipped.xattrs.get("trusted.overlay.opaque"), Some(&1));
}

fn docker_save(arch: &str) -> Vec<u8> {
    let layers = layers();
    let manifest = json!([
        {"Config": "config.json", "RepoTags": ["a:1"], "Layers": ["0/layer.tar", "1/layer.tar", "2/layer.tar"]},
        {"Config": "config.json", "RepoTags": null, "Layers": ["0/layer.tar"]},
    ]);
    tar(&[
        dir("0"),
        bytes_of("0/layer.tar", &layers[0]),
        bytes_of("data", &layers[1]),
        symlink("1/layer.tar", "../data"),
        bytes_of("2/layer.tar", &layers[2]),
        bytes_of("config.json", &config(arch)),
        bytes_of("manifest.json", manifest.to_string().as_bytes()),
    ])
}

fn oci(arch: &str, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let descriptor =
        |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()});
    let config = config(arch);
    let layers = layers();
    let listed: Vec<_> = layers
        .iter()
        .map(|layer| descriptor("application/vnd.oci.image.layer.v1.tar", layer))
        .collect();
    let manifest = json!({"schemaVersion": 2, "layers": listed,
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config)});
    let manifest = manifest.to_string().into_bytes();
    let index =
        json!({"schemaVersion": 2, "manifests": [descriptor("application/vnd.oci.image.manifest.v1+json", &manifest)]});
    let blob = |bytes: &[u8]| bytes_of(&format!("blobs/sha256/{}", &digest(bytes)[7..]), bytes);
    let mut members = vec![
        file("oci-layout", "{}"),
        bytes_of("index.json", index.to_string().as_bytes()),
        blob(&config),
        blob(&manifest),
    ];
    for layer in &layers {
        let mut member = blob(layer);
        change(&mut member.data);
        members.push(member);
    }
    tar(&members)
}

#[test]
fn archives_of_docker_are_unpacked() {
    let root = Root::new();
    let mut job = job(&root, &docker_save("amd64"));
    let error = unpack(&job).unwrap_err();
    assert!(error.contains("several images") && error.contains("a:1"), "{error}");
    job.reference = Some("b:1".to_owned());
    assert!(unpack(&job).unwrap_err().contains("no such image"));
    job.reference = Some("a:1".to_owned());
    let report = unpack(&job).unwrap();
    check(&root);
    check_report(&report);
}

#[test]
fn archives_of_oci_are_unpacked() {
    let root = Root::new();
    let report = unpack(&job(&root, &gzip(&oci("amd64", |_| {})))).unwrap();
    check(&root);
    check_report(&report);
    assert!(report.digest.is_some_and(|digest| digest.starts_with("sha256:")));
    let root = Root::new();
    let error = unpack(&job(&root, &oci("amd64", |data| data.push(0)))).unwrap_err();
    assert!(error.contains("wrong contents"), "{error}");
}

#[test]
fn other_architectures_are_refused() {
    for archive in [docker_save("arm64"), oci("arm64", |_| {})] {
        let root = Root::new();
        let job = UnpackJob {
            reference: Some("a:1".to_owned()),
            ..job(&root, &archive)
        };
        let error = unpack(&job).unwrap_err();
        assert!(error.contains("wrong architecture: it is for linux/arm64"), "{error}");
    }
}

#[test]
fn root_file_systems_are_unpacked() {
    let members = [
        dir("etc"),
        file("etc/x", "x").owner(5, 6),
        file("manifest.json.d/x", "x"),
    ];
    for archive in [tar(&members), gzip(&tar(&members)), zstd(&tar(&members))] {
        let root = Root::new();
        let report = unpack(&job(&root, &archive)).unwrap();
        assert_eq!(root.state("etc/x"), "f 644 5:6");
        assert_eq!((report.arch, report.bytes), (None, 2));
    }
}

#[test]
fn owners_that_a_sandbox_has_not_are_counted() {
    let root = Root::new();
    let archive = tar(&[
        file("f", "x").owner(u64::from(u32::MAX), 0),
        file("g", "x").owner(1 << 40, 0),
    ]);
    let report = unpack(&job(&root, &archive)).unwrap();
    assert_eq!(report.skipped.owners, 2);
    assert_eq!(root.state("f"), "f 644 0:0");
}

#[test]
fn hostile_images_stay_inside() {
    let mut wrong = Vec::new();
    for case in hostile::cases() {
        let root = Root::new();
        std::fs::create_dir(root.beside("outside")).unwrap();
        std::fs::write(root.beside("outside/secret"), "secret").unwrap();
        // As many images have it, so that links into it lead somewhere.
        std::fs::create_dir(root.path().join("outside")).unwrap();
        let done = unpack(&job(&root, &case.archive));
        wrong.extend(hostile::judge(case.name, &done, &case.image, &root, ""));
        hostile::untouched(case.name, &root.beside("outside"));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn hostile_whiteouts_stay_inside() {
    for (name, words) in [
        (".wh...", "invalid whiteout"),
        (".wh..", "invalid whiteout"),
        (".wh.", "invalid whiteout"),
        ("../.wh.secret", "leads out"),
        ("l/.wh.secret", ""),
    ] {
        let root = Root::new();
        std::fs::create_dir(root.beside("outside")).unwrap();
        std::fs::write(root.beside("outside/secret"), "secret").unwrap();
        let layers = [
            tar(&[symlink("l", "../outside"), file("kept", "x")]),
            tar(&[member(b'0', name), member(b'0', "l/.wh..wh..opq")]),
        ];
        let manifest = json!([{"Config": "c", "Layers": ["0", "1"]}]);
        let archive = tar(&[
            bytes_of("0", &layers[0]),
            bytes_of("1", &layers[1]),
            bytes_of("c", &config("amd64")),
            bytes_of("manifest.json", manifest.to_string().as_bytes()),
        ]);
        match unpack(&job(&root, &archive)) {
            Err(error) => assert!(!words.is_empty() && error.contains(words), "{name}: {error}"),
            Ok(_) => assert_eq!(words, "", "{name}"),
        }
        hostile::untouched(name, &root.beside("outside"));
        assert_eq!(root.read("kept"), "x");
    }
}
