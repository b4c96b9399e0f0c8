// XML-RPC (xmlrpc-c) over HTTP and TCP: its Abyss server and its client by libcurl.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <xmlrpc-c/base.hpp>
#include <xmlrpc-c/client_simple.hpp>
#include <xmlrpc-c/registry.hpp>
#include <xmlrpc-c/server_abyss.hpp>
#include <xmlrpc-c/client.hpp>
#include <xmlrpc-c/client_transport.hpp>

#include "peer.hpp"

namespace {

using xmlrpc_c::value;

// A call with more structures takes seconds.
constexpr int64_t MOST_STRUCTURES = 10000;

struct Fixed {
    int32_t left, right;
    double weight;
};
struct Variable {
    std::string text;
    double weight;
};

value encode(const std::string& kind, int64_t n) {
    if (kind == "byte") {
        std::vector<unsigned char> all;
        for (int64_t at = 0; at < n; at++) all.push_back(peer::byte_at(at));
        return xmlrpc_c::value_bytestring(all);
    }
    if (n > MOST_STRUCTURES) throw std::runtime_error("unavailable: more than 10,000 structures take seconds");
    std::vector<value> all;
    for (int64_t at = 0; at < n; at++) {
        std::map<std::string, value> one;
        if (kind == "fixed") {
            one["left"] = xmlrpc_c::value_int(peer::number_at(at));
            one["right"] = xmlrpc_c::value_int(peer::number_at(-at));
        } else {
            one["text"] = xmlrpc_c::value_string(peer::text_at(at));
        }
        one["weight"] = xmlrpc_c::value_double(peer::weight_at(at));
        all.push_back(xmlrpc_c::value_struct(one));
    }
    return xmlrpc_c::value_array(all);
}

// Into native structures, as the other peers' libraries do.
double decode(const std::string& kind, const value& from) {
    if (kind == "byte") {
        auto all = xmlrpc_c::value_bytestring(from).vectorUcharValue();
        return peer::byte_answer(all.size(), all.back());
    }
    auto values = xmlrpc_c::value_array(from).vectorValueValue();
    double last = 0;
    std::vector<Fixed> fixed;
    std::vector<Variable> variable;
    for (auto& one : values) {
        auto members = static_cast<std::map<std::string, value>>(xmlrpc_c::value_struct(one));
        last = static_cast<double>(xmlrpc_c::value_double(members["weight"]));
        if (kind == "fixed") {
            fixed.push_back({static_cast<int>(xmlrpc_c::value_int(members["left"])), static_cast<int>(xmlrpc_c::value_int(members["right"])), last});
        } else {
            variable.push_back({static_cast<std::string>(xmlrpc_c::value_string(members["text"])), last});
        }
    }
    return peer::answer(values.size(), last);
}

struct Nothing : xmlrpc_c::method {
    void execute(const xmlrpc_c::paramList&, value* to) override { *to = xmlrpc_c::value_boolean(true); }
};
struct Send : xmlrpc_c::method {
    void execute(const xmlrpc_c::paramList& from, value* to) override { *to = xmlrpc_c::value_double(decode(from.getString(0), from[1])); }
};
struct Receive : xmlrpc_c::method {
    std::string what;
    // A value cannot be assigned twice.
    std::vector<value> kept;
    void execute(const xmlrpc_c::paramList& from, value* to) override {
        const std::string kind = from.getString(0), asked = kind + std::to_string(from.getInt(1));
        if (asked != what) kept.clear(), kept.push_back(encode(kind, from.getInt(1))), what = asked;
        *to = kept.front();
    }
};

int serve(const std::string& port) {
    xmlrpc_limit_set(XMLRPC_XML_SIZE_LIMIT_ID, size_t(1) << 30);
    xmlrpc_c::registry registry;
    registry.addMethod("nothing", new Nothing);
    registry.addMethod("send", new Send);
    registry.addMethod("receive", new Receive);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(atoi(port.c_str()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address)) throw std::runtime_error("cannot listen on port " + port);
    // One connection for the whole run, as far as the server allows it.
    xmlrpc_c::serverAbyss server(
        xmlrpc_c::serverAbyss::constrOpt().registryP(&registry).socketFd(listener).keepaliveMaxConn(2000000000).keepaliveTimeout(3600).timeout(3600));
    peer::ready();
    server.run();
    return 0;
}

int call(const std::string& port) {
    xmlrpc_limit_set(XMLRPC_XML_SIZE_LIMIT_ID, size_t(1) << 30);
    auto transport = std::make_shared<xmlrpc_c::clientXmlTransport_curl>();
    auto client = std::make_shared<xmlrpc_c::client_xml>(transport.get());
    auto where = std::make_shared<xmlrpc_c::carriageParm_curl0>("http://127.0.0.1:" + port + "/RPC2");
    return peer::answer_orders([=](const peer::Order& order) -> peer::Call {
        const auto call = [transport, client, where](const std::string& name, const xmlrpc_c::paramList& with) {
            xmlrpc_c::rpcPtr rpc(name, with);
            rpc->call(client.get(), where.get());
            return rpc->getResult();
        };
        const std::string kind = order.kind;
        if (kind == "null") return [=] { call("nothing", xmlrpc_c::paramList()); };
        const double wanted = peer::expected(kind, order.elements);
        xmlrpc_c::paramList with;
        with.addc(kind);
        if (order.sends()) {
            with.add(encode(kind, order.elements));
            return [=] { peer::check(static_cast<double>(xmlrpc_c::value_double(call("send", with))), wanted); };
        }
        if (kind != "byte" && order.elements > MOST_STRUCTURES) encode(kind, order.elements);
        with.addc(int(order.elements));
        return [=] { peer::check(decode(kind, call("receive", with)), wanted); };
    });
}

}  // namespace

int main(int argc, char** argv) { return peer::run(argc, argv, serve, call); }
