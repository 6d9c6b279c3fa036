//! Manifests that a hostile registry sends: what is accepted has the properties that the rest relies on, and what is
//! refused says so in a few printable words, because the message is stored and shown.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Longest message that is made of a manifest, in characters: 20 platforms, or one text.
const MESSAGE_MAX: usize = 20 * 10 * 201 + 200;

fn digests() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "sha256:[0-9a-f]{64}",
        1 => "sha256:[0-9a-fA-F]{63,65}",
        1 => "sha(512|256):[0-9a-f./]{0,64}",
        1 => ".{0,8}",
    ]
}

fn media_types() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("application/vnd.oci.image.config.v1+json".to_owned()),
        2 => Just("application/vnd.docker.container.image.v1+json".to_owned()),
        2 => Just("application/vnd.oci.image.layer.v1.tar+gzip".to_owned()),
        1 => Just("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip".to_owned()),
        1 => Just("application/vnd.oci.image.layer.v1.tar+encrypted".to_owned()),
        1 => ".{0,300}",
    ]
}

fn sizes() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => any::<u64>().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => ".{0,300}".prop_map(Value::from),
    ]
}

fn platforms() -> impl Strategy<Value = Value> {
    let words = || prop_oneof![4 => "linux|amd64|arm64", 1 => "windows|unknown", 1 => ".{0,300}"];
    let variant = prop_oneof![Just(Value::Null), "v[0-9]".prop_map(Value::from)];
    (words(), words(), variant)
        .prop_map(|(os, architecture, variant)| json!({"os": os, "architecture": architecture, "variant": variant}))
}

fn descriptors() -> impl Strategy<Value = Value> {
    (media_types(), digests(), sizes(), proptest::option::of(platforms())).prop_map(
        |(kind, digest, size, platform)| json!({"mediaType": kind, "digest": digest, "size": size, "platform": platform}),
    )
}

/// Documents whose parts are mostly valid, so that many get far.
fn documents() -> impl Strategy<Value = Value> {
    let version = prop_oneof![8 => Just(json!(2)), 1 => Just(json!(1)), 1 => sizes()];
    let list = || proptest::option::of(proptest::collection::vec(descriptors(), 0..4));
    (version, list(), proptest::option::of(descriptors()), list()).prop_map(|(version, manifests, config, layers)| {
        let mut document = json!({"schemaVersion": version});
        for (name, value) in [
            ("manifests", json!(manifests)),
            ("config", json!(config)),
            ("layers", json!(layers)),
        ] {
            if !value.is_null() {
                document[name] = value;
            }
        }
        document
    })
}

/// Asserts what holds for every manifest.
fn check(bytes: &[u8]) {
    let (image, index) = match Manifest::parse(bytes) {
        Err(error) => return check_message(&format!("{error:#}")),
        Ok(Manifest::Image(image)) => (Some(image), None),
        Ok(Manifest::Index(index)) => (None, Some(index)),
    };
    if let Some(Image { config, layers }) = image {
        assert!(layers.len() <= LAYERS_MAX);
        for one in layers.iter().chain([&config]) {
            let digest = one.digest().expect("checked");
            // It becomes part of addresses and of names of files.
            assert!(digest.hex().len() == 64 && digest.hex().bytes().all(|byte| byte.is_ascii_hexdigit()));
            assert!(!one.media_type.contains("foreign") && !one.media_type.contains("encrypted"));
        }
    }
    for arch in ["amd64", "arm64"] {
        let Some(index) = &index else { return };
        match index.select(arch, None) {
            Err(error) => check_message(&format!("{error:#}")),
            Ok(digest) => {
                let is_it = |one: &&Descriptor| one.digest == digest.to_string();
                let mut chosen = index.0.iter().filter(is_it);
                let is_fit = |one: &Descriptor| {
                    let platform = one.platform.as_ref();
                    platform.is_none_or(|platform| platform.os == "linux" && platform.architecture == arch)
                };
                assert!(chosen.any(is_fit), "{digest}");
            }
        }
    }
}

fn check_message(message: &str) {
    assert!(message.chars().count() <= MESSAGE_MAX, "{} characters", message.len());
    assert!(!message.chars().any(char::is_control), "{message:?}");
}

proptest! {
    #[test]
    fn what_is_accepted_is_sound(document in documents()) {
        check(document.to_string().as_bytes());
    }

    #[test]
    fn damaged_documents_are_refused_or_sound(document in documents(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut text = document.to_string().into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        check(&text);
        text.truncate(at);
        check(&text);
    }

    #[test]
    fn the_order_of_an_index_does_not_decide(rotation in 0_usize..4) {
        let mut manifests = ["amd64", "arm64", "s390x", "riscv64"].map(|arch| {
            let digest = Digest::of(arch.as_bytes()).to_string();
            json!({"digest": digest, "platform": {"os": "linux", "architecture": arch}})
        });
        manifests.rotate_left(rotation);
        let text = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
        let Ok(Manifest::Index(index)) = Manifest::parse(text.as_bytes()) else { panic!("an index") };
        for arch in ["amd64", "arm64", "s390x", "riscv64"] {
            prop_assert_eq!(index.select(arch, None).unwrap(), Digest::of(arch.as_bytes()));
        }
    }

    #[test]
    fn digests_have_one_form(text in digests()) {
        let is_one = text.len() == 71
            && text.starts_with("sha256:")
            && text[7..].bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        prop_assert_eq!(Digest::parse(&text).is_ok(), is_one);
    }
}

#[test]
fn large_and_deep_documents_are_refused_in_a_few_words() {
    let zero = format!("sha256:{:064}", 0);
    let long = "\u{1b}[31m".repeat(100_000);
    let platform = |os: &str| json!({"digest": zero, "platform": {"os": os, "architecture": long}});
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    let config = json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": zero, "size": 1});
    for text in [
        json!({"schemaVersion": long}).to_string(),
        json!({"schemaVersion": 2, "config": {"mediaType": long, "digest": zero}, "layers": []}).to_string(),
        json!({"schemaVersion": 2, "config": config, "layers": [{"digest": zero, "mediaType": format!("foreign{long}")}]}).to_string(),
        json!({"schemaVersion": 2, "config": config, "layers": long}).to_string(),
        json!({"schemaVersion": 2, "config": {"digest": long, "mediaType": "image.config"}, "layers": []}).to_string(),
        format!(r#"{{"schemaVersion":2,"manifests":{deep}}}"#),
        deep,
    ] {
        let error = Manifest::parse(text.as_bytes()).unwrap_err();
        check_message(&format!("{error:#}"));
    }
    let many = json!({"schemaVersion": 2, "manifests": vec![platform("windows"); 100]}).to_string();
    check(many.as_bytes());
}

#[test]
fn nothing_is_said_twice() {
    let zero = format!("sha256:{:064}", 0);
    let config = format!(r#"{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{zero}","size":1}}"#);
    let once = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[]}}"#);
    assert!(Manifest::parse(once.as_bytes()).is_ok());
    for twice in [
        format!(r#"{{"schemaVersion":2,"config":{config},"config":{config},"layers":[]}}"#),
        format!(r#"{{"schemaVersion":2,"config":{config},"layers":[],"layers":[]}}"#),
        format!(r#"{{"schemaVersion":1,"schemaVersion":2,"config":{config},"layers":[]}}"#),
        once.replace(r#""size":1"#, r#""size":1,"size":2"#),
        format!("{once}{once}"),
    ] {
        assert!(Manifest::parse(twice.as_bytes()).is_err(), "{twice}");
    }
}

#[test]
fn as_many_layers_as_are_allowed_are_read() {
    let zero = format!("sha256:{:064}", 0);
    let config = json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": zero, "size": 1});
    for (count, is_read) in [(LAYERS_MAX, true), (LAYERS_MAX + 1, false)] {
        let text =
            json!({"schemaVersion": 2, "config": config, "layers": vec![json!({"digest": zero}); count]}).to_string();
        assert_eq!(Manifest::parse(text.as_bytes()).is_ok(), is_read, "{count}");
    }
}
