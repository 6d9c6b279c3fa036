//! Sandboxes become layers, and sandboxes are started from them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::id::{LayerId, SandboxId};
use node::Node;
use protocol::agent::Init;
use protocol::node::{Image, LayerStack, LayerStream, NodeApi, NodeError, StartSandbox};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{open, request, run};

/// A sandbox with root as its user.
pub(super) async fn start(node: &Node, id: &str, image: Image) -> SandboxId {
    let id: SandboxId = id.parse().unwrap();
    node.start(StartSandbox {
        image,
        init: Init {
            default_user: Some("root".to_owned()),
            ..Init::default()
        },
        ..request(&id)
    })
    .await
    .unwrap();
    id
}

/// Runs a script that fails at the first command that fails.
pub(super) async fn passes(node: &Node, id: &SandboxId, script: &str) {
    let answer = run(node, id, &format!("set -eux; {script}")).await;
    assert!(answer.contains("exit status 0"), "{}", decoded(&answer));
}

/// What a program wrote, for the message of a failure: chunks in base64 in the messages of the response.
fn decoded(answer: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = answer.to_owned();
    for part in answer.split('"').filter(|part| part.len() > 8) {
        let (mut bits, mut count) = (0u32, 0);
        for digit in part.bytes() {
            let Some(value) = DIGITS.iter().position(|known| *known == digit) else {
                continue;
            };
            bits = bits << 6 | u32::try_from(value).unwrap();
            count += 6;
            if count >= 8 {
                count -= 8;
                text.push(char::from(u8::try_from(bits >> count & 0xff).unwrap()));
            }
        }
        text.push('\n');
    }
    text
}

async fn commit(node: &Node, id: &SandboxId, merge: bool) -> LayerId {
    let committed = node.commit(id, merge).await.unwrap();
    assert!(committed.bytes > 0);
    committed.layer
}

pub(super) fn above_base(layers: &[LayerId]) -> Image {
    Image::Layers {
        base: true,
        layers: layers.to_vec(),
    }
}

fn without_base(layers: &[LayerId]) -> Image {
    Image::Layers {
        base: false,
        layers: layers.to_vec(),
    }
}

/// Writes every kind of file, and changes what is below.
const WRITE: &str = r#"
cd /home/user
echo one > file; chown user:user file; touch -d @1000000000 file
mkdir dir; echo x > dir/a; ln dir/a dir/b; ln -s /etc/passwd link; mkfifo fifo; mv dir renamed
truncate -s 10G sparse; printf end | dd of=sparse conv=notrunc bs=1 seek=5000000000 status=none
cp /usr/bin/id /usr/local/bin/suid; chmod 4755 /usr/local/bin/suid
rm /etc/timezone /usr/bin/yes; rm -r /etc/skel /usr/share/doc; mkdir /etc/skel; echo new > /etc/skel/new
cp /usr/bin/grep /usr/local/bin/capable
python3 - <<'END'
import os, socket, struct
os.setxattr('/usr/local/bin/capable', 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << 10, 0, 0, 0))
os.setxattr('/home/user/file', 'user.note', b'a\0b')
socket.socket(socket.AF_UNIX).bind('/home/user/socket')
for name in (b'new\nline', b'n' * 255, b'\xff\xfe', b' $(x) '):
    open(b'/home/user/' + name, 'wb').write(name)
END
"#;

/// Script that checks what the layer has of all that.
const CHECK: &str = r#"
cd /home/user
[ "$(cat file)" = one ]; [ "$(stat -c %u:%g:%a:%Y file)" = 1000:1000:644:1000000000 ]
[ renamed/a -ef renamed/b ]; [ "$(stat -c %h renamed/a)" = 2 ]; [ ! -e dir ]
[ "$(readlink link)" = /etc/passwd ]; [ -p fifo ]; [ ! -e socket ]
[ "$(stat -c %s sparse)" = 10737418240 ]; [ "$(stat -c %b sparse)" -lt 100 ]
[ "$(dd if=sparse bs=1 skip=5000000000 count=3 status=none)" = end ]
[ "$(stat -c %u:%g:%a /usr/local/bin/suid)" = 0:0:4755 ]
[ ! -e /etc/timezone ]; [ ! -e /usr/bin/yes ]; [ ! -e /usr/share/doc ]; [ "$(ls -A /etc/skel)" = new ]
[ -e /usr/bin/env ]; [ -e /etc/hosts ]
python3 - <<'END'
import os, subprocess
def as_user(*command):
    def become(): os.setgid(1000); os.setuid(1000)
    return subprocess.run(command, preexec_fn=become, capture_output=True, text=True, check=True).stdout
assert as_user('/usr/local/bin/suid', '-u') == '0\n'
assert as_user('/usr/local/bin/capable', 'CapEff', '/proc/self/status').split()[1] == '0000000000000400'
assert os.getxattr('/home/user/file', 'user.note') == b'a\0b'
for name in (b'new\nline', b'n' * 255, b'\xff\xfe', b' $(x) '):
    assert open(b'/home/user/' + name, 'rb').read() == name
END
"#;

pub(crate) async fn sandboxes_become_layers(data_dir: &Path) {
    let host = open(data_dir).await;
    let node: &Node = &host.node;
    let one = start(node, "ione", Image::Base).await;
    passes(node, &one, WRITE).await;
    // What a request gave to this sandbox alone, as the agent writes it, and a file of the same name elsewhere.
    let given = "echo secret | tee /run/ringfence/sandbox.json /run/ringfence/.ringfence-ca.tmp > /run/sandbox.json";
    passes(node, &one, given).await;
    let layer = commit(node, &one, false).await;
    let run = data_dir.join("layers").join(layer.as_str()).join("root/run");
    assert!(run.join("sandbox.json").exists());
    assert_eq!(fs::read_dir(run.join("ringfence")).map_or(0, Iterator::count), 0);
    assert!(
        matches!(node.kill(&one).await, Err(NodeError::NotFound(_))),
        "it has ended"
    );
    assert_eq!(crate::disks(data_dir), 0);
    let listed = node.layers().await.unwrap();
    assert_eq!(listed.iter().map(|info| &info.id).collect::<Vec<_>>(), [&layer]);

    // It goes to another node and back as an archive.
    let mut archive = Vec::new();
    let mut exported = node.export_layer(&layer).await.unwrap();
    exported.read_to_end(&mut archive).await.unwrap();
    assert!(archive.len() < 20 << 20, "{}", archive.len());
    node.remove_layer(&layer).await.unwrap();
    assert_eq!(
        node.export_layer(&layer).await.unwrap_err(),
        NodeError::NoLayer(layer.clone())
    );
    let import = async |id: &LayerId, archive: &[u8]| {
        let archive = LayerStream::new(std::io::Cursor::new(archive.to_vec()));
        node.import_layer(id, 1 << 30, archive).await
    };
    let other = LayerId::from_hash(&[1; 32]);
    for (id, archive) in [
        (&other, &archive[..]),
        (&layer, &archive[..archive.len() / 2]),
        (&layer, b""),
    ] {
        let refused = import(id, archive).await;
        assert!(matches!(refused, Err(NodeError::Refused(_))), "{refused:?}");
        assert_eq!(fs::read_dir(data_dir.join("layers")).unwrap().count(), 0);
    }
    // A reader that goes away, and one that fails.
    drop(import(&layer, &archive));
    let (mut to, from) = tokio::io::duplex(1 << 10);
    let cut = async {
        to.write_all(&archive[..5000]).await.unwrap();
        drop(to);
    };
    let (refused, ()) = tokio::join!(node.import_layer(&layer, 1 << 30, LayerStream::new(from)), cut);
    assert!(matches!(refused, Err(NodeError::Refused(_))), "{refused:?}");
    let imported = import(&layer, &archive).await.unwrap();
    assert_eq!(imported.layer, layer);
    assert_eq!(node.layers().await.unwrap(), listed);
    drop(node.export_layer(&layer).await.unwrap());

    // Two sandboxes share it. Neither changes it, and each has the same owners in a range of its own.
    let stored = data_dir.join("layers").join(layer.as_str()).join("root/home/user");
    let (two, three) = (
        start(node, "itwo", above_base(std::slice::from_ref(&layer))).await,
        start(node, "ithree", above_base(std::slice::from_ref(&layer))).await,
    );
    for id in [&two, &three] {
        passes(node, id, CHECK).await;
        passes(node, id, "rm -r /home/user/renamed; echo changed > /home/user/file").await;
    }
    assert_eq!(fs::read_to_string(stored.join("file")).unwrap(), "one\n");
    assert!(stored.join("renamed/b").exists());

    // A layer above it, which refers to what is below, and both merged into one that does not.
    passes(
        node,
        &two,
        "rm /home/user/link; rm -r /etc/skel; mkdir /etc/skel; echo y > /usr/bin/yes; mkdir /usr/share/doc",
    )
    .await;
    let changed = "cd /home/user; [ \"$(cat file)\" = changed ]; [ ! -e renamed ]; [ ! -h link ]; [ -p fifo ]; \
                   [ -z \"$(ls -A /etc/skel)\" ]; [ \"$(cat /usr/bin/yes)\" = y ]; [ ! -e /etc/timezone ]; \
                   [ -z \"$(ls -A /usr/share/doc)\" ]; [ -u /usr/local/bin/suid ]";
    let upper = commit(node, &two, false).await;
    let four = start(node, "ifour", above_base(&[layer.clone(), upper.clone()])).await;
    passes(node, &four, changed).await;
    let merged = commit(node, &four, true).await;
    let five = start(node, "ifive", above_base(std::slice::from_ref(&merged))).await;
    passes(node, &five, changed).await;

    // Layers are removed under a sandbox that uses them.
    for layer in [&layer, &upper, &merged] {
        node.remove_layer(layer).await.unwrap();
    }
    assert!(node.layers().await.unwrap().is_empty());
    passes(node, &five, changed).await;
    let refused = node
        .start(StartSandbox {
            image: above_base(std::slice::from_ref(&merged)),
            ..request(&"isix".parse().unwrap())
        })
        .await;
    assert_eq!(refused, Err(NodeError::NoLayer(merged)));
    let removed = || fs::read_dir(data_dir.join("layers")).unwrap().count();
    assert_eq!(removed(), 2, "those of the third and the fifth");
    for id in [&three, &five] {
        node.kill(id).await.unwrap();
    }
    host.node.release().await;
    drop(host);
    // The next start deletes what was in use.
    let host = open(data_dir).await;
    host.node.reconcile(Vec::new()).await.unwrap();
    for _ in 0..1000 {
        if removed() == 0 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(removed(), 0);
    host.node.release().await;
}

pub(crate) async fn many_steps(data_dir: &Path) {
    let host = open(data_dir).await;
    let node: &Node = &host.node;
    let mut layers: Vec<LayerId> = Vec::new();
    for step in 1..=20 {
        let id = start(node, "istep", above_base(&layers)).await;
        let script = format!(
            "cd /home/user; echo {step} > {step}; echo {step} >> all; rm -f ./{}; rm -rf dir; mkdir dir; echo > dir/{step}",
            step - 2
        );
        passes(node, &id, &script).await;
        let merge = layers.len() == Image::LAYERS_MAX;
        let layer = commit(node, &id, merge).await;
        if merge {
            layers = vec![layer];
        } else {
            layers.push(layer);
        }
    }
    assert_eq!(layers.len(), 8);
    let check = "cd /home/user; [ \"$(cat 19 20)\" = \"$(printf '19\\n20')\" ]; [ \"$(ls)\" = \"$(printf \
                 '19\\n20\\nall\\ndir')\" ]; [ \"$(cat all)\" = \"$(seq 20)\" ]; [ \"$(ls dir)\" = 20 ]";
    let id = start(node, "istep", above_base(&layers)).await;
    passes(node, &id, check).await;
    // The same content is the same layer, whatever it was made of.
    let merged = commit(node, &id, true).await;
    let id = start(node, "istep", above_base(std::slice::from_ref(&merged))).await;
    passes(node, &id, check).await;
    assert_eq!(commit(node, &id, true).await, merged);
    for layer in node.layers().await.unwrap() {
        node.remove_layer(&layer.id).await.unwrap();
    }
    host.node.release().await;
}

/// Copies a shell with its libraries to `/mnt`, which has nothing else but what is in the way.
const IMPORT: &str = r#"
[ -z "$(ls -A /mnt)" ]
mkdir -p /mnt/bin /mnt/etc /mnt/home
cp /bin/sh /mnt/bin/sh
for library in $(ldd /bin/sh | grep -o '/[^ ]*'); do mkdir -p /mnt$(dirname $library); cp -L $library /mnt$library; done
ln -s /nowhere /mnt/proc; ln -s / /mnt/run; echo > /mnt/dev; ln -s /nowhere /mnt/etc/resolv.conf; mkfifo /mnt/etc/hosts
echo image > /mnt/etc/motd; chown 1000 /mnt/home
"#;

pub(crate) async fn images_without_base(data_dir: &Path) {
    let host = open(data_dir).await;
    let node: &Node = &host.node;
    // Nothing at all but the agent.
    let scratch = start(node, "iscratch", without_base(&[])).await;
    let answer = run(node, &scratch, "true").await;
    assert!(!answer.contains("exit status 0"), "{answer}");
    node.kill(&scratch).await.unwrap();

    let import = start(node, "iimport", Image::Import).await;
    passes(node, &import, IMPORT).await;
    let layer = commit(node, &import, false).await;
    let stored: PathBuf = data_dir.join("layers").join(layer.as_str());
    assert!(!stored.join("usr").exists());
    assert!(!stored.join("root/var").exists(), "only what is in /mnt");
    // A file system without base cannot be above base.
    let refused = node
        .start(StartSandbox {
            image: above_base(std::slice::from_ref(&layer)),
            ..request(&"imixed".parse().unwrap())
        })
        .await;
    assert_eq!(refused, Err(NodeError::NoLayer(layer.clone())));

    // Between two file systems, of which only one is changed.
    let stack = |base, layers: &[LayerId]| LayerStack {
        base,
        layers: layers.to_vec(),
    };
    let between = Image::Copy {
        to: stack(false, std::slice::from_ref(&layer)),
        from: stack(true, &[]),
    };
    let copy = start(node, "icopy", between).await;
    let script = "[ -e /mnt/etc/motd ]; [ ! -e /media/etc/motd-of-none ]; cp /media/usr/bin/id /mnt/copied; \
                  echo no > /media/lost; echo no > /lost; touch /usr/lost";
    passes(node, &copy, script).await;
    let copied = commit(node, &copy, false).await;
    let stored: PathBuf = data_dir.join("layers").join(copied.as_str());
    let names = fs::read_dir(stored.join("root")).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["copied"]);
    assert!(!stored.join("usr").exists());
    let above = Image::Copy {
        to: stack(true, &[]),
        from: stack(false, &[layer.clone(), copied]),
    };
    let copy = start(node, "iabove", above).await;
    passes(
        node,
        &copy,
        "cp /media/copied /mnt/usr/bin/copied; [ -e /mnt/usr/bin/env ]",
    )
    .await;
    let copied = commit(node, &copy, false).await;
    let stored: PathBuf = data_dir.join("layers").join(copied.as_str());
    assert!(stored.join("usr/bin/copied").exists() && !stored.join("usr/lost").exists());

    let image = start(node, "iimage", without_base(std::slice::from_ref(&layer))).await;
    // The shell has no programs here, but it can test and read.
    passes(
        node,
        &image,
        "[ ! -e /usr/bin/env ]; read line < /etc/motd; [ $line = image ]; read word address < /etc/resolv.conf; \
         [ $word = nameserver ]; read line < /etc/hostname; [ $line = sandbox ]; [ -f /etc/hosts ]; \
         [ -d /proc/1 ]; [ -c /dev/null ]; [ -d /sys/class ]; [ -e /run/ringfence/agent ]; [ -k /tmp ]; \
         echo 1 > /tmp/x; echo 2 > /etc/hosts; [ -w /home ]",
    )
    .await;
    let upper = commit(node, &image, false).await;
    let image = start(node, "iimage", without_base(&[layer, upper])).await;
    passes(
        node,
        &image,
        "read line < /tmp/x; [ $line = 1 ]; read line < /etc/motd; [ $line = image ]",
    )
    .await;
    let merged = commit(node, &image, true).await;
    let image = start(node, "iimage", without_base(&[merged])).await;
    passes(
        node,
        &image,
        "read line < /tmp/x; read line < /etc/motd; [ -d /dev/shm ]",
    )
    .await;
    node.kill(&image).await.unwrap();
    for layer in node.layers().await.unwrap() {
        node.remove_layer(&layer.id).await.unwrap();
    }
    host.node.release().await;
}

pub(crate) async fn what_cannot_be_a_layer(data_dir: &Path) {
    let host = open(data_dir).await;
    let node: &Node = &host.node;
    let deep = start(node, "ideep", Image::Base).await;
    let script = "python3 -c \"import os\nos.chdir('/home')\nfor i in range(600): os.mkdir('d'); os.chdir('d')\"";
    passes(node, &deep, script).await;
    match node.commit(&deep, false).await {
        Err(NodeError::Refused(why)) => assert!(why.contains("/home/d/d/d"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(node.commit(&deep, false).await, Err(NodeError::NotFound(_))));
    assert_eq!(crate::disks(data_dir), 0);
    assert_eq!(fs::read_dir(data_dir.join("layers")).unwrap().count(), 0);
    // A caller that goes away leaves nothing half done.
    let id = start(node, "igone", Image::Base).await;
    passes(node, &id, "head -c 20M /dev/urandom > /home/user/data").await;
    let (calling, called) = (Arc::clone(&host.node), id.clone());
    let call = tokio::task::spawn(async move { calling.commit(&called, false).await });
    // Goes away at a moment that may be any after the call was received.
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    call.abort();
    for _ in 0..3000 {
        if !node.layers().await.unwrap().is_empty() && crate::disks(data_dir) == 0 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let layers = node.layers().await.unwrap();
    assert!(layers[0].bytes > 20 << 20, "{layers:?}");
    node.remove_layer(&layers[0].id).await.unwrap();
    host.node.release().await;
}
