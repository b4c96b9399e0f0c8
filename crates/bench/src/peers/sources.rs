//! The other programs that `rpc` measures: their sources, the packages that they need, and how they are compiled.
//!
//! Each is a separate program that links nothing of Partywall: ZeroC Ice has the GPL.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    error::{BenchError, During, Result},
    mechanism::Mechanism,
};

/// The form of the address that a peer's server takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressForm {
    /// The path of a UNIX socket.
    Path,
    /// A port on loopback.
    Port,
    /// A name that is unique to the pair of programs.
    Name,
}

/// A library for calls, and the small program that measures it.
#[derive(Debug)]
pub(crate) struct PeerSource {
    pub(crate) mechanism: Mechanism,
    pub(crate) address: AddressForm,
    /// Files of the program, with their content.
    files: &'static [(&'static str, &'static str)],
    /// Programs, and files where the name begins with a slash, with the Debian packages that they are in.
    needs: &'static [(&'static str, &'static str)],
    /// The commands of a shell that make `program` from the files.
    build: &'static str,
}

const HEADER: (&str, &str) = ("peer.hpp", include_str!("../../peers/peer.hpp"));
const COMPILER: (&str, &str) = ("c++", "g++");

/// All of them, in the order of tables.
pub(crate) const SOURCES: [PeerSource; 6] = [
    PeerSource {
        mechanism: Mechanism::Unix,
        address: AddressForm::Path,
        files: &[HEADER, ("sockets.cpp", include_str!("../../peers/sockets.cpp"))],
        needs: &[COMPILER],
        build: "c++ -std=c++17 -O2 -I. sockets.cpp -o program",
    },
    PeerSource {
        mechanism: Mechanism::Ice,
        address: AddressForm::Port,
        files: &[
            HEADER,
            ("Peer.ice", include_str!("../../peers/Peer.ice")),
            ("ice.cpp", include_str!("../../peers/ice.cpp")),
        ],
        needs: &[
            COMPILER,
            ("slice2cpp", "zeroc-ice-compilers"),
            ("/usr/include/Ice/Ice.h", "libzeroc-ice-dev"),
        ],
        build: "slice2cpp Peer.ice
            c++ -std=c++17 -O2 -DICE_CPP11_MAPPING -I. ice.cpp Peer.cpp -o program -lIce++11 -pthread",
    },
    PeerSource {
        mechanism: Mechanism::XmlRpc,
        address: AddressForm::Port,
        files: &[HEADER, ("xmlrpc.cpp", include_str!("../../peers/xmlrpc.cpp"))],
        needs: &[
            COMPILER,
            ("xmlrpc-c-config", "libxmlrpc-core-c3-dev"),
            ("/usr/include/xmlrpc-c/client_simple.hpp", "libxmlrpc-c++8-dev"),
        ],
        // Its shared libraries bring libcurl; the link would need the development package only to name it again.
        build: "c++ -std=c++17 -O2 -I. xmlrpc.cpp -o program \
            $(xmlrpc-c-config c++2 client abyss-server --cflags --libs | sed s/-lcurl//)",
    },
    PeerSource {
        mechanism: Mechanism::Grpc,
        address: AddressForm::Path,
        files: &[
            HEADER,
            ("peer.proto", include_str!("../../peers/peer.proto")),
            ("grpc.cpp", include_str!("../../peers/grpc.cpp")),
        ],
        needs: &[
            COMPILER,
            ("pkg-config", "pkg-config"),
            ("protoc", "protobuf-compiler"),
            ("grpc_cpp_plugin", "protobuf-compiler-grpc"),
            ("/usr/include/grpcpp/grpcpp.h", "libgrpc++-dev"),
        ],
        build: "protoc --cpp_out=. --grpc_out=. --plugin=protoc-gen-grpc=$(command -v grpc_cpp_plugin) peer.proto
            c++ -std=c++17 -O2 -I. grpc.cpp peer.pb.cc peer.grpc.pb.cc -o program $(pkg-config --cflags --libs grpc++ protobuf)",
    },
    PeerSource {
        mechanism: Mechanism::Capnp,
        address: AddressForm::Path,
        files: &[
            HEADER,
            ("peer.capnp", include_str!("../../peers/peer.capnp")),
            ("capnp.cpp", include_str!("../../peers/capnp.cpp")),
        ],
        needs: &[
            COMPILER,
            ("pkg-config", "pkg-config"),
            ("capnp", "capnproto"),
            ("/usr/include/capnp/ez-rpc.h", "libcapnp-dev"),
        ],
        build: "capnp compile -oc++ peer.capnp
            c++ -std=c++17 -O2 -I. capnp.cpp peer.capnp.c++ -o program $(pkg-config --cflags --libs capnp-rpc)",
    },
    PeerSource {
        mechanism: Mechanism::PartywallPython,
        address: AddressForm::Name,
        files: &[("program", include_str!("../../peers/calls.py"))],
        needs: &[("/usr/bin/python3", "python3"), ("/usr/lib/python3/dist-packages/numpy", "python3-numpy")],
        build: "chmod +x program; /usr/bin/python3 -c 'import partywall' 2> /dev/null || { echo 'no module partywall (make wheel, then pip install it or set PYTHONPATH)' >&2; exit 1; }",
    },
];

impl PeerSource {
    /// The packages that are missing for it.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        missing(self.needs)
    }

    /// Compiles it in `folder`, which is made.
    ///
    /// # Errors
    /// [`BenchError::Unavailable`] with the missing packages, or with the last line of the compiler.
    pub(crate) fn build(&self, folder: &Path) -> Result<PathBuf> {
        let missing = self.missing();
        if !missing.is_empty() {
            return Err(BenchError::Unavailable(format!("it needs Debian's {}", missing.join(" "))));
        }
        fs::create_dir_all(folder).during(format!("making {}", folder.display()))?;
        for (name, content) in self.files {
            let path = folder.join(name);
            fs::write(&path, content).during(format!("writing {}", path.display()))?;
        }
        let mut command = Command::new("sh");
        command.args(["-ec", self.build]).current_dir(folder).stdin(Stdio::null());
        let output = command.output().during(format!("compiling the program for {}", self.mechanism))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let line = said.lines().find(|line| line.contains("error")).or(said.lines().last()).unwrap_or_default();
            return Err(BenchError::Unavailable(format!("its program does not compile here: {line}")));
        }
        Ok(folder.join("program"))
    }
}

/// The packages of those needs that are absent.
pub(crate) fn missing(needs: &[(&str, &'static str)]) -> Vec<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // An ordinary user's path may lack the system folders.
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain(system).collect();
    let is_there = |sign: &str| match sign.starts_with('/') {
        true => Path::new(sign).exists(),
        false => folders.iter().any(|folder| folder.join(sign).is_file()),
    };
    needs.iter().filter(|(sign, _)| !is_there(sign)).map(|(_, package)| *package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_programs_and_files_name_their_packages() {
        let needs = [("sh", "dash"), ("no-such-program", "one"), ("/etc", "base"), ("/no/such/file", "two")];
        assert_eq!(missing(&needs), ["one", "two"]);
    }

    #[test]
    fn program_that_does_not_compile_is_unavailable() {
        let folder = tempfile::tempdir().unwrap();
        let broken = PeerSource {
            mechanism: Mechanism::Ice,
            address: AddressForm::Port,
            files: &[("a", "")],
            needs: &[],
            build: "echo 'a.cpp: error: nothing here' >&2; false; touch program",
        };
        let error = broken.build(&folder.path().join("ice")).unwrap_err();
        assert!(matches!(&error, BenchError::Unavailable(why) if why.contains("error: nothing here")), "{error}");
    }
}
