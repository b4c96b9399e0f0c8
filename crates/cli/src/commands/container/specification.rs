//! The specification: what a container with the device gets, as CDI 0.3 says it (podman 4.1, docker 25 and containerd 1.7 read it).

use std::path::Path;

use partywall_protocol::environment;
use serde_json::{Value, json};

/// The vendor and the class of the device.
pub(super) const KIND: &str = "partywall.dev/host";
/// The device as engines name it.
pub(super) const DEVICE: &str = "partywall.dev/host=all";

/// The folder of the host where the broker has a separate socket for containers: its clients are never administrators.
pub(super) const SOCKET_FOLDER: &str = "/run/partywall/containers";

/// Where the library's folder is in a container.
pub(super) const LIBRARY_FOLDER: &str = "/usr/lib/partywall";

/// glibc puts the folder of the image's libraries in place of `$LIB` (`lib`, `lib64`, `lib/x86_64-linux-gnu`), and finds the library there. musl looks for a
/// folder that is called `$LIB`, and finds a note for the container's log. With the library itself, musl's programs would not start.
pub(super) const PRELOAD: &str = "/usr/lib/partywall/$LIB/libpartywall_preload.so";

/// The specification for a host with the library in this folder.
pub(super) fn of(library: &Path) -> Value {
    // Folders, not files: a bound file would stay the old one after the broker's restart or the library's upgrade.
    let mount = |host: &Path, container: &str| {
        json!({
            "hostPath": host,
            "containerPath": container,
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    };
    json!({
        "cdiVersion": "0.3.0",
        "kind": KIND,
        "devices": [{
            "name": "all",
            "containerEdits": {
                "env": [format!("{}={PRELOAD}", environment::PRELOAD)],
                "mounts": [
                    mount(library, LIBRARY_FOLDER),
                    // Read-only: a container can connect to the socket, and neither remove nor replace it.
                    mount(Path::new(SOCKET_FOLDER), "/run/partywall"),
                ],
            },
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of an object in the JSON schema of CDI 0.3 (specs-go/config.go of its repository), and those that must be there.
    struct SchemaObject {
        fields: &'static [&'static str],
        required: &'static [&'static str],
    }

    const SPECIFICATION: SchemaObject = SchemaObject {
        fields: &["cdiVersion", "kind", "devices", "containerEdits"],
        required: &["cdiVersion", "kind", "devices"],
    };
    const DEVICE_OBJECT: SchemaObject =
        SchemaObject { fields: &["name", "containerEdits"], required: &["name", "containerEdits"] };
    const EDITS: SchemaObject = SchemaObject { fields: &["env", "deviceNodes", "hooks", "mounts"], required: &[] };
    const MOUNT: SchemaObject =
        SchemaObject { fields: &["hostPath", "containerPath", "options"], required: &["hostPath", "containerPath"] };

    fn assert_object(value: &Value, schema: &SchemaObject) {
        let object = value.as_object().unwrap_or_else(|| panic!("{value} is no object"));
        for key in object.keys() {
            assert!(schema.fields.contains(&key.as_str()), "CDI has no field {key}: {value}");
        }
        for key in schema.required {
            assert!(object.contains_key(*key), "CDI requires {key}: {value}");
        }
    }

    fn strings(value: &Value) -> Vec<&str> {
        value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
    }

    #[test]
    fn specification_has_the_fields_of_cdi_and_no_others() {
        let all = of(Path::new("/usr/lib/partywall/container"));
        assert_object(&all, &SPECIFICATION);
        assert_eq!(all["cdiVersion"], "0.3.0");
        // VENDOR/CLASS: letters, digits, and `-`, `_`, `.` between them.
        let (vendor, class) = KIND.split_once('/').unwrap();
        let is_word = |text: &str| {
            let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            text.starts_with(|c: char| c.is_ascii_alphabetic())
                && text.chars().all(inner)
                && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        };
        assert!(is_word(vendor) && is_word(class), "{KIND}");
        let devices = all["devices"].as_array().unwrap();
        assert!(!devices.is_empty());
        for device in devices {
            assert_object(device, &DEVICE_OBJECT);
            let name = device["name"].as_str().unwrap();
            assert!(is_word(name), "{name}");
            assert_eq!(DEVICE, format!("{KIND}={name}"));
            let edits = &device["containerEdits"];
            assert_object(edits, &EDITS);
            for variable in strings(&edits["env"]) {
                assert!(variable.split_once('=').is_some_and(|(name, _)| !name.is_empty()), "{variable}");
            }
            for mount in edits["mounts"].as_array().unwrap() {
                assert_object(mount, &MOUNT);
                for path in ["hostPath", "containerPath"] {
                    assert!(mount[path].as_str().unwrap().starts_with('/'), "{mount}");
                }
                assert!(strings(&mount["options"]).contains(&"ro"), "{mount}");
            }
        }
    }
}
