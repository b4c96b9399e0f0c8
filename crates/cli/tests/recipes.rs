//! The files that Partywall ships or prints for other programs, as those see them: units for systemd, XML for libvirt.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{Guard, partywall, said};

/// The limit of systemd's marks for exposure, in tenths: below 5 it reports `OK`, and our units are well below.
const MOST_EXPOSED: &str = "--threshold=25";

/// Runs a program that not every machine has.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    let output = Command::new(program).args(arguments).output().ok();
    if output.is_none() {
        eprintln!("skipped: there is no {program} on this machine");
    }
    output
}

#[test]
fn systemd_accepts_units_and_rates_them_confined() {
    let Some(version) = run("systemd-analyze", &["--version"]) else { return };
    // `systemd 252 (252.39-1~deb12u1)`
    let version = String::from_utf8_lossy(&version.stdout).split(' ').nth(1).and_then(|v| v.parse().ok()).unwrap_or(0);
    if version < 250 {
        eprintln!("skipped: units are looked at by systemd 250 or newer, and this is {version}");
        return;
    }
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = tempfile::tempdir().unwrap();
    for unit in [
        "daemon/partywalld.service",
        "agent/partywall-agent.service",
        "cli/partywall-numbers.service",
        "vhost/partywall-net@.service",
    ] {
        let text = std::fs::read_to_string(crates.join(unit)).unwrap();
        // Neither the programs nor the pages of the manual need be installed.
        let line = |line: &str| match line.split_once("=/usr/local/bin/partywall") {
            Some((key, _)) => format!("{key}=/bin/true\n"),
            None if line.starts_with("Documentation=") => String::new(),
            None => format!("{line}\n"),
        };
        let name = Path::new(unit).file_name().unwrap().to_str().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text.lines().map(line).collect::<String>()).unwrap();
        let path = path.to_str().unwrap();
        let verified = run("systemd-analyze", &["verify", "--recursive-errors=no", path]).unwrap();
        // systemd only warns of unknown settings, and it warns of this machine's own units, too.
        // It speaks of a template by the name of one of its instances.
        let stem = name.trim_end_matches(".service");
        assert!(verified.status.success() && !said(&verified).contains(stem), "{unit}: {}", said(&verified));
        let marked = run("systemd-analyze", &["security", "--offline=true", "--no-pager", MOST_EXPOSED, path]).unwrap();
        assert!(marked.status.success(), "{unit}: {}{}", String::from_utf8_lossy(&marked.stdout), said(&marked));
    }
}

#[test]
fn libvirt_accepts_printed_xml() {
    let machine = print_for_libvirt(&["vm", "args", "a"]);
    let (xml, rest) = machine.split_once("\n\n").unwrap();
    assert!(rest.contains("partywall vm attach a --qmp /var/lib/libvirt/qemu/domain-a/monitor.sock"), "{rest}");
    let (_, without_name) = xml.split_once("<name>a</name>").unwrap_or_else(|| panic!("no name in {xml}"));
    let domain = xml.split_once('>').unwrap().0;
    accepts(&format!("{domain}>{without_name}"));
}

#[test]
fn libvirt_accepts_printed_xml_of_cards_and_disks() {
    for words in [
        &["net", "args", "lan", "a"][..],
        &["net", "args", "lan", "a", "--queues", "4", "--mtu", "9000"],
        &["blk", "args", "--socket", "/run/a.sock"],
        &["blk", "args", "--socket", "/run/a.sock", "--queues", "2"],
    ] {
        accepts(&print_for_libvirt(words));
    }
}

fn print_for_libvirt(words: &[&str]) -> String {
    let output = Guard::spawn(partywall(words).arg("--libvirt")).output();
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The schema of libvirt has what is printed of a machine, with the other elements that every machine has.
fn accepts(xml: &str) {
    let (domain, rest) = xml.split_once('>').unwrap();
    let others = "<name>a</name><memory unit='GiB'>1</memory><os><type arch='x86_64' machine='pc'>hvm</type></os>";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.xml");
    std::fs::write(&path, format!("{domain}>{others}{rest}")).unwrap();
    let Some(validated) = run("virt-xml-validate", &[path.to_str().unwrap(), "domain"]) else { return };
    assert!(validated.status.success(), "{xml}\n{}{}", String::from_utf8_lossy(&validated.stdout), said(&validated));
}

/// The options that `partywall vm args` prints before its blank line, and those below a comment that begins with `comment`.
fn printed_options(comment: &str) -> (String, String) {
    let output = Guard::spawn(&mut partywall(&["vm", "args", "a", "--sockets", "/run/partywall"])).output();
    let text = String::from_utf8(output.stdout).unwrap();
    let (options, rest) = text.split_once("\n\n").unwrap();
    let below = rest.lines().skip_while(|line| !line.starts_with(comment)).nth(1);
    (options.to_owned(), below.unwrap_or_else(|| panic!("no line `{comment}` in {text}")).to_owned())
}

/// The text of a file in the repository.
fn read(file: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap();
    std::fs::read_to_string(root.join(file)).unwrap()
}

#[test]
fn readme_names_a_dependency_and_features_that_exist() {
    let readme = read("README.md");
    let (_, dependencies) = readme.split_once("[dependencies]\n").unwrap();
    let (line, rest) = dependencies.split_once('\n').unwrap();
    let path = line.split('"').nth(1).unwrap().strip_prefix("../partywall/").unwrap();
    let manifest = read(&format!("{path}/Cargo.toml"));
    assert!(manifest.contains("name = \"partywall\""), "{path}");
    let feature = rest.split_once("features = [\"").unwrap().1.split_once('"').unwrap().0;
    assert!(manifest.contains(&format!("\n{feature} = [")), "the crate has no feature {feature}");
}

#[test]
fn kernel_message_of_read_only_windows_is_explained() {
    let guide = read("docs/vm.md");
    let line = guide.lines().find(|line| line.contains("not_armed")).unwrap();
    assert!(line.contains("nfit") && line.contains("Nothing is wrong"), "{line}");
}

#[test]
fn documented_qemu_options_are_the_printed_ones() {
    let (options, without_kvm) = printed_options("# With KVM: -accel kvm. Without it,");
    assert!(without_kvm.starts_with("-accel tcg"), "{without_kvm}");

    // The README's command takes the options up to the blank line, and has those for machines without KVM in its text.
    let readme = read("README.md");
    assert!(readme.contains("$(partywall vm args a | sed '/^$/,$d')"), "the README takes the printed options");
    assert!(readme.contains(&format!("also {without_kvm}\n")), "the README lacks `{without_kvm}`");

    let guide = read("docs/vm.md");
    let lines: Vec<&str> = guide.lines().map(str::trim).collect();
    let printed: Vec<&str> = options.lines().collect();
    assert!(lines.windows(printed.len()).any(|some| some == printed), "docs/vm.md has other options than\n{options}");
}
