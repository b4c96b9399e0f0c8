// A stream socket without RPC: bytes and structures are written as they are, variable ones behind their lengths. The address is the path of a
// UNIX socket, or HOST:PORT for TCP.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "peer.hpp"

namespace {

struct Fixed {
    int32_t left, right;
    double weight;
};
struct Variable {
    std::string text;
    double weight;
};
struct Head {
    char kind, direction;
    int64_t elements, bytes;
};

void put(int fd, const void* from, size_t len) {
    auto at = static_cast<const char*>(from);
    while (len > 0) {
        const ssize_t n = write(fd, at, len);
        if (n <= 0) throw std::runtime_error("writing to a socket failed");
        at += n, len -= n;
    }
}

bool get(int fd, void* to, size_t len) {
    auto at = static_cast<char*>(to);
    while (len > 0) {
        const ssize_t n = read(fd, at, len);
        if (n == 0) return false;
        if (n < 0) throw std::runtime_error("reading from a socket failed");
        at += n, len -= n;
    }
    return true;
}

struct Data {
    std::vector<uint8_t> bytes;
    std::vector<Fixed> fixed;
    std::vector<Variable> variable;
    std::vector<char> buffer;

    void fill(char kind, int64_t n) {
        for (int64_t at = 0; at < n; at++) {
            if (kind == 'b') bytes.push_back(peer::byte_at(at));
            if (kind == 'f') fixed.push_back({peer::number_at(at), peer::number_at(-at), peer::weight_at(at)});
            if (kind == 'v') variable.push_back({peer::text_at(at), peer::weight_at(at)});
        }
    }
    void send(int fd, char kind, char direction) {
        const void* from = nullptr;
        int64_t elements = 0, len = 0;
        if (kind == 'b') from = bytes.data(), elements = len = bytes.size();
        if (kind == 'f') from = fixed.data(), elements = fixed.size(), len = elements * sizeof(Fixed);
        if (kind == 'v') {
            size_t total = 0;
            for (auto& one : variable) total += 12 + one.text.size();
            buffer.resize(total);
            char* to = buffer.data();
            for (auto& one : variable) {
                const uint32_t size = one.text.size();
                memcpy(to, &size, 4), memcpy(to + 4, one.text.data(), size), memcpy(to + 4 + size, &one.weight, 8);
                to += 12 + size;
            }
            from = buffer.data(), elements = variable.size(), len = total;
        }
        const Head head{kind, direction, elements, len};
        put(fd, &head, sizeof head);
        put(fd, from, len);
    }
    double take(int fd, const Head& head) {
        const int64_t n = head.elements;
        if (head.kind == 'b') {
            bytes.resize(n), get(fd, bytes.data(), n);
            return peer::byte_answer(n, bytes.back());
        }
        if (head.kind == 'f') {
            fixed.resize(n), get(fd, fixed.data(), n * sizeof(Fixed));
            return peer::answer(n, fixed.back().weight);
        }
        if (head.kind == 'v') {
            buffer.resize(head.bytes), get(fd, buffer.data(), head.bytes);
            variable.clear(), variable.reserve(n);
            const char* from = buffer.data();
            for (int64_t at = 0; at < n; at++) {
                uint32_t size;
                double weight;
                memcpy(&size, from, 4), memcpy(&weight, from + 4 + size, 8);
                variable.push_back({std::string(from + 4, size), weight});
                from += 12 + size;
            }
            return peer::answer(n, variable.back().weight);
        }
        return 0;
    }
};

struct Address {
    union {
        sockaddr any;
        sockaddr_un unix_path;
        sockaddr_in inet;
    };
    socklen_t len;
    bool is_tcp;

    explicit Address(const std::string& text) : unix_path{}, len(sizeof unix_path), is_tcp(false) {
        std::string host;
        int port = 0;
        if (peer::split(text, host, port)) {
            is_tcp = true, len = sizeof inet, inet = {};
            inet.sin_family = AF_INET, inet.sin_port = htons(uint16_t(port));
            if (inet_pton(AF_INET, host.c_str(), &inet.sin_addr) != 1) throw std::runtime_error("not an address: " + text);
        } else {
            unix_path.sun_family = AF_UNIX;
            strncpy(unix_path.sun_path, text.c_str(), sizeof unix_path.sun_path - 1);
        }
    }
    int open() const { return socket(any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0); }
    // A call is not to wait until the other side has acknowledged the one before.
    void make_prompt(int fd) const {
        const int on = 1;
        if (is_tcp && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on)) throw std::runtime_error("cannot set TCP_NODELAY");
    }
};

int serve(const std::string& text) {
    const Address address(text);
    const int listener = address.open();
    if (bind(listener, &address.any, address.len) || listen(listener, 1)) throw std::runtime_error("cannot listen on " + text);
    peer::ready();
    const int fd = accept(listener, nullptr, nullptr);
    address.make_prompt(fd);
    Data data, prepared;
    std::string what;
    for (Head head; get(fd, &head, sizeof head);) {
        if (head.direction == 'r') {
            const std::string asked = head.kind + std::to_string(head.elements);
            if (asked != what) prepared = Data(), prepared.fill(head.kind, head.elements), what = asked;
            prepared.send(fd, head.kind, 's');
        } else {
            const double answer = data.take(fd, head);
            put(fd, &answer, sizeof answer);
        }
    }
    return 0;
}

int call(const std::string& text) {
    const Address address(text);
    const int fd = address.open();
    if (connect(fd, &address.any, address.len)) throw std::runtime_error("cannot connect to " + text);
    address.make_prompt(fd);
    return peer::answer_orders([fd](const peer::Order& order) -> peer::Call {
        auto data = std::make_shared<Data>();
        const char kind = order.kind[0];
        const int64_t n = order.elements;
        const double wanted = kind == 'n' ? 0 : peer::expected(order.kind, n);
        if (order.sends()) data->fill(kind, n);
        return [=, sends = order.sends()] {
            double answer = 0;
            if (sends) {
                data->send(fd, kind, 's');
                get(fd, &answer, sizeof answer);
            } else {
                Head head{kind, 'r', n, 0};
                put(fd, &head, sizeof head);
                get(fd, &head, sizeof head);
                answer = data->take(fd, head);
            }
            peer::check(answer, wanted);
        };
    });
}

}  // namespace

int main(int argc, char** argv) { return peer::run(argc, argv, serve, call); }
