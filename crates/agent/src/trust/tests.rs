//! Trust stores as images of different distributions have them, and as none should have them.

use super::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::pem::tests::certificate;

/// An image: directories (`a/`), files, and links (`-> b`).
fn image(entries: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, content) in entries {
        let path = root.path().join(name);
        if name.ends_with('/') {
            fs::create_dir_all(&path).unwrap();
            continue;
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match content.strip_prefix("-> ") {
            Some(target) => symlink(target, &path).unwrap(),
            None => fs::write(&path, content).unwrap(),
        }
    }
    root
}

/// Runs both steps of installing a certificate.
fn install(root: &Path, bundle: &Bundle) -> io::Result<Trust> {
    let trust = super::install(root, bundle)?;
    install_more(root, bundle)?;
    Ok(trust)
}

fn read(root: &tempfile::TempDir, path: &str) -> String {
    fs::read_to_string(root.path().join(path)).unwrap()
}

fn bundle(number: u8) -> Bundle {
    Bundle::parse(&certificate(number)).unwrap()
}

/// The content of a bundle with this certificate of ours added.
fn extended(roots: &str, number: u8) -> String {
    format!("{roots}{BEGIN_MARK}{}{END_MARK}", certificate(number))
}

#[test]
fn where_distributions_have_their_roots() {
    let roots = format!("# some roots\n{}", certificate(1));
    let check = |entries: &[(&str, &str)], bundle_path: &'static str, anchor: Option<&str>| {
        let root = image(entries);
        let file = root.path().join(bundle_path);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
        let trust = install(root.path(), &bundle(7)).unwrap();
        assert_eq!((trust.adding, trust.bundle), (bundle_path, Some(bundle_path)));
        assert_eq!(read(&root, bundle_path), extended(&roots, 7));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o444);
        assert_eq!(read(&root, OWN), certificate(7));
        if let Some(anchor) = anchor {
            assert_eq!(read(&root, anchor), certificate(7));
        }
        // Again is the same, another takes its place, and the tool of the image may have collected the old one.
        install(root.path(), &bundle(7)).unwrap();
        assert_eq!(read(&root, bundle_path), extended(&roots, 7));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(&file, format!("{roots}{}", certificate(7))).unwrap();
        install(root.path(), &bundle(8)).unwrap();
        assert_eq!(read(&root, bundle_path), extended(&roots, 8));
        assert_eq!(read(&root, OWN), certificate(8));
        let left_over = fs::read_dir(file.parent().unwrap()).unwrap();
        assert!(
            left_over
                .flatten()
                .all(|entry| entry.file_name() != ".ringfence-ca.tmp")
        );
        root
    };
    let debian = check(
        &[
            ("etc/ssl/certs/ca-certificates.crt", &roots),
            ("usr/lib/ssl/openssl.cnf", ""),
            ("usr/local/share/ca-certificates/", ""),
        ],
        "etc/ssl/certs/ca-certificates.crt",
        Some("usr/local/share/ca-certificates/ringfence-ca.crt"),
    );
    for path in OPENSSL {
        let target = fs::read_link(debian.path().join(path)).unwrap();
        assert_eq!(target, Path::new("/etc/ssl/certs/ca-certificates.crt"));
    }
    let alpine = check(
        &[
            ("etc/ssl/certs/ca-certificates.crt", &roots),
            ("etc/ssl/cert.pem", "-> certs/ca-certificates.crt"),
        ],
        "etc/ssl/certs/ca-certificates.crt",
        None,
    );
    let target = fs::read_link(alpine.path().join("etc/ssl/cert.pem")).unwrap();
    assert_eq!(target, Path::new("certs/ca-certificates.crt"));
    check(
        &[
            ("etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", &roots),
            ("etc/pki/ca-trust/source/anchors/", ""),
            (
                "etc/pki/tls/certs/ca-bundle.crt",
                "-> /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
            ),
            ("etc/ssl/certs", "-> ../pki/tls/certs"),
        ],
        "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
        Some("etc/pki/ca-trust/source/anchors/ringfence-ca.crt"),
    );
    check(
        &[
            ("var/lib/ca-certificates/ca-bundle.pem", &roots),
            ("etc/ssl/ca-bundle.pem", "-> /var/lib/ca-certificates/ca-bundle.pem"),
            ("etc/pki/trust/anchors/", ""),
        ],
        "var/lib/ca-certificates/ca-bundle.pem",
        Some("etc/pki/trust/anchors/ringfence-ca.crt"),
    );
}

#[test]
fn an_image_without_roots() {
    let root = image(&[]);
    for number in [7, 7, 8] {
        let trust = install(root.path(), &bundle(number)).unwrap();
        assert_eq!((trust.adding, trust.bundle), (USUAL, None));
        assert_eq!(read(&root, USUAL), extended("", number));
        assert_eq!(read(&root, OWN), certificate(number));
    }
    // Programs with roots of their own must keep them.
    let trust = install(root.path(), &bundle(8)).unwrap();
    let env = trust.env();
    let names: Vec<&str> = env.keys().map(String::as_str).collect();
    assert_eq!(names, ["DENO_CERT", "NODE_EXTRA_CA_CERTS"]);
    assert_eq!(env["DENO_CERT"], format!("/{USUAL}"));
    // Roots that come later count.
    fs::write(root.path().join(USUAL), certificate(1)).unwrap();
    let trust = install(root.path(), &bundle(8)).unwrap();
    assert_eq!(trust.bundle, Some(USUAL));
    assert_eq!(read(&root, USUAL), extended(&certificate(1), 8));
    let env = trust.env();
    assert_eq!(env["SSL_CERT_FILE"], format!("/{USUAL}"));
    assert_eq!(env["NODE_EXTRA_CA_CERTS"], format!("/{USUAL}"));
    assert_eq!(env.len(), ADDING.len() + REPLACING.len());
}

#[test]
fn links_are_not_written_through() {
    // A link where the bundle is: its roots are used, and it is left alone.
    let roots = certificate(1);
    let root = image(&[("store/roots", &roots), (USUAL, "-> ../../../store/roots")]);
    let trust = install(root.path(), &bundle(7)).unwrap();
    assert_eq!(trust.bundle, Some(OWN_BUNDLE));
    assert_eq!(read(&root, "store/roots"), roots);
    assert_eq!(read(&root, OWN_BUNDLE), extended(&roots, 7));

    // Of what is not a certificate nothing is passed on, and none of it is written to.
    let secret = "root:secret\n";
    let root = image(&[
        ("secret", secret),
        (USUAL, "-> ../../../secret"),
        ("etc/ssl/cert.pem", "-> ../../secret"),
        ("etc/pki/tls/certs/ca-bundle.crt", &roots),
        ("etc/pki/tls/certs/.ringfence-ca.tmp", "-> ../../../../secret"),
        (
            "usr/local/share/ca-certificates/ringfence-ca.crt",
            "-> ../../../../secret",
        ),
        ("run/ringfence/ca.pem", "-> ../../secret"),
    ]);
    let trust = install(root.path(), &bundle(7)).unwrap();
    assert_eq!(read(&root, "secret"), secret);
    assert_eq!(trust.bundle, Some("etc/pki/tls/certs/ca-bundle.crt"));
    for path in ["usr/local/share/ca-certificates/ringfence-ca.crt", OWN] {
        assert!(fs::symlink_metadata(root.path().join(path)).unwrap().is_file());
        assert_eq!(read(&root, path), certificate(7));
    }

    // A directory that leads elsewhere.
    let root = image(&[("elsewhere/kept", ""), ("run/ringfence", "-> ../elsewhere")]);
    assert!(install(root.path(), &bundle(7)).is_err());
    assert_eq!(fs::read_dir(root.path().join("elsewhere")).unwrap().count(), 1);
}

#[test]
fn what_is_no_bundle_is_left_alone() {
    let roots = certificate(1);
    let root = image(&[("etc/pki/tls/certs/ca-bundle.crt", &roots), ("etc/ssl/certs/", "")]);
    let fifo = root.path().join(USUAL);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    let trust = install(root.path(), &bundle(7)).unwrap();
    assert_eq!(trust.bundle, Some("etc/pki/tls/certs/ca-bundle.crt"));
    // Longer than any bundle, and as long as one may be.
    fs::remove_file(&fifo).unwrap();
    let limit = 4 * 1024 * 1024;
    for (length, extended) in [(limit, true), (limit + 1, false)] {
        fs::write(&fifo, format!("{roots}{}", "#".repeat(length - roots.len()))).unwrap();
        install(root.path(), &bundle(7)).unwrap();
        assert_eq!(read(&root, USUAL).contains(BEGIN_MARK), extended, "{length}");
    }
    // Marks that do not belong together, text that is not UTF-8, and no line break at the end.
    let marks = [END_MARK.as_bytes(), BEGIN_MARK.as_bytes()].concat();
    let content = [&marks, roots.trim_end().as_bytes(), b"\xff"].concat();
    let (has_roots, composed) = compose(&content, &of_host(&bundle(7), &[]));
    assert!(has_roots);
    let expect = |number| [&content, b"\n".as_slice(), extended("", number).as_bytes()].concat();
    assert_eq!(composed, expect(7));
    assert_eq!(compose(&composed, &of_host(&bundle(8), &[])).1, expect(8));
}

fn of_host<'a>(host: &'a Bundle, own: &'a [&'a str]) -> Certificates<'a> {
    Certificates { host, own, local: &[] }
}

#[test]
fn what_the_image_trusts_by_itself_is_collected() {
    let directory = "usr/local/share/ca-certificates";
    let roots = certificate(1);
    let (of_company, of_team, of_host) = (certificate(2), certificate(3), certificate(7));
    let root = image(&[
        (USUAL, &roots),
        (&format!("{directory}/company.crt"), &format!("text\n{of_company}")),
        (&format!("{directory}/team/team.crt"), "-> /opt/team.pem"),
        ("opt/team.pem", &of_team),
        (COLLECTOR, "#!/bin/sh"),
        // Not by that tool: another end, none at all, what leads out of the image, and what never ends.
        (&format!("{directory}/other.pem"), &certificate(4)),
        (&format!("{directory}/secret.crt"), "root:secret\n"),
        (
            &format!("{directory}/out.crt"),
            "-> ../../../../../../../../etc/ssl/certs/ca-certificates.crt",
        ),
        (&format!("{directory}/loop"), "-> ."),
    ]);
    let fifo = root.path().join(directory).join("fifo.crt");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    let block = |certificates: &[&str]| format!("{BEGIN_MARK}{}{END_MARK}", certificates.concat());
    for _ in 0..2 {
        install(root.path(), &bundle(7)).unwrap();
        // Each once, also those that the image has already.
        assert_eq!(
            read(&root, USUAL),
            format!("{roots}{}", block(&[&of_host, &of_company, &of_team]))
        );
        assert_eq!(read(&root, &format!("{directory}/ringfence-ca.crt")), of_host);
    }
    // The tool was run, which takes everything, and then one is removed.
    fs::write(
        root.path().join(USUAL),
        format!("{roots}{of_company}{of_team}{of_host}"),
    )
    .unwrap();
    fs::remove_file(root.path().join(directory).join("team/team.crt")).unwrap();
    install(root.path(), &bundle(7)).unwrap();
    assert_eq!(
        read(&root, USUAL),
        format!("{roots}{of_company}{of_team}{}", block(&[&of_host]))
    );
}

#[test]
fn each_certificate_of_the_host_has_a_file_for_the_tool() {
    let directory = "usr/local/share/ca-certificates";
    let root = image(&[(USUAL, &certificate(1)), (&format!("{directory}/"), "")]);
    let three = Bundle::parse(&[certificate(7), certificate(8), certificate(9)].concat()).unwrap();
    let one = bundle(9);
    let cases: [(&Bundle, &[&str]); 2] = [
        (
            &three,
            &["ringfence-ca.crt", "ringfence-ca-1.crt", "ringfence-ca-2.crt"],
        ),
        (&one, &["ringfence-ca.crt"]),
    ];
    for (bundle, names) in cases {
        install(root.path(), bundle).unwrap();
        for (name, certificate) in names.iter().zip(bundle.certificates()) {
            assert_eq!(read(&root, &format!("{directory}/{name}")), certificate);
        }
        assert_eq!(fs::read_dir(root.path().join(directory)).unwrap().count(), names.len());
        assert_eq!(
            read(&root, USUAL),
            format!("{}{BEGIN_MARK}{}{END_MARK}", certificate(1), bundle.text())
        );
        assert_eq!(read(&root, OWN), bundle.text());
    }
}

#[test]
fn many_of_ours_are_removed_in_one_pass() {
    let ours = certificate(7);
    let content = format!("{}{}", extended("", 7).repeat(10_000), ours.repeat(10_000));
    assert_eq!(
        compose(content.as_bytes(), &of_host(&bundle(8), &[&ours])),
        (false, extended("", 8).into_bytes())
    );
}
