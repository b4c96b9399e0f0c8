// ZeroC Ice over TCP, the only local transport that it has. The address is a port of loopback, or HOST:PORT.
#include <Ice/Ice.h>

#include "Peer.h"
#include "peer.hpp"

namespace {

Bench::Bytes bytes(int64_t n) {
    Bench::Bytes all;
    for (int64_t at = 0; at < n; at++) all.push_back(peer::byte_at(at));
    return all;
}
Bench::FixedSequence fixed(int64_t n) {
    Bench::FixedSequence all;
    for (int64_t at = 0; at < n; at++) all.push_back({peer::number_at(at), peer::number_at(-at), peer::weight_at(at)});
    return all;
}
Bench::VariableSequence variable(int64_t n) {
    Bench::VariableSequence all;
    for (int64_t at = 0; at < n; at++) all.push_back({peer::text_at(at), peer::weight_at(at)});
    return all;
}

// A sequence of the last length that a client asked for.
template <class Sequence>
const Sequence& prepared(int count, Sequence (*make)(int64_t)) {
    static Sequence kept;
    if (int(kept.size()) != count) kept = make(count);
    return kept;
}

struct Server : Bench::Peer {
    void nothing(const Ice::Current&) override {}
    double sendBytes(Bench::Bytes all, const Ice::Current&) override { return peer::byte_answer(all.size(), all.back()); }
    double sendFixed(Bench::FixedSequence all, const Ice::Current&) override { return peer::answer(all.size(), all.back().weight); }
    double sendVariable(Bench::VariableSequence all, const Ice::Current&) override { return peer::answer(all.size(), all.back().weight); }
    ReceiveBytesMarshaledResult receiveBytes(int n, const Ice::Current& current) override {
        return ReceiveBytesMarshaledResult(prepared(n, bytes), current);
    }
    ReceiveFixedMarshaledResult receiveFixed(int n, const Ice::Current& current) override {
        return ReceiveFixedMarshaledResult(prepared(n, fixed), current);
    }
    ReceiveVariableMarshaledResult receiveVariable(int n, const Ice::Current& current) override {
        return ReceiveVariableMarshaledResult(prepared(n, variable), current);
    }
};

Ice::InitializationData properties() {
    Ice::InitializationData data;
    data.properties = Ice::createProperties();
    // Messages of any size.
    data.properties->setProperty("Ice.MessageSizeMax", "0");
    return data;
}

std::string endpoint(const std::string& address) {
    std::string host = "127.0.0.1";
    int port = 0;
    if (!peer::split(address, host, port)) port = atoi(address.c_str());
    return "tcp -h " + host + " -p " + std::to_string(port);
}

int serve(const std::string& address) {
    Ice::CommunicatorHolder ice(properties());
    auto adapter = ice->createObjectAdapterWithEndpoints("peer", endpoint(address));
    adapter->add(std::make_shared<Server>(), Ice::stringToIdentity("peer"));
    adapter->activate();
    peer::ready();
    ice->waitForShutdown();
    return 0;
}

int call(const std::string& address) {
    Ice::CommunicatorHolder ice(properties());
    auto proxy = Ice::checkedCast<Bench::PeerPrx>(ice->stringToProxy("peer:" + endpoint(address)));
    return peer::answer_orders([proxy](const peer::Order& order) -> peer::Call {
        const int64_t n = order.elements;
        const double wanted = order.kind == "null" ? 0 : peer::expected(order.kind, n);
        if (order.kind == "null") return [=] { proxy->nothing(); };
        if (order.kind == "byte") {
            if (order.sends()) return [=, all = bytes(n)] { peer::check(proxy->sendBytes(all), wanted); };
            return [=] {
                auto all = proxy->receiveBytes(int(n));
                peer::check(peer::byte_answer(all.size(), all.back()), wanted);
            };
        }
        if (order.kind == "fixed") {
            if (order.sends()) return [=, all = fixed(n)] { peer::check(proxy->sendFixed(all), wanted); };
            return [=] {
                auto all = proxy->receiveFixed(int(n));
                peer::check(peer::answer(all.size(), all.back().weight), wanted);
            };
        }
        if (order.sends()) return [=, all = variable(n)] { peer::check(proxy->sendVariable(all), wanted); };
        return [=] {
            auto all = proxy->receiveVariable(int(n));
            peer::check(peer::answer(all.size(), all.back().weight), wanted);
        };
    });
}

}  // namespace

int main(int argc, char** argv) { return peer::run(argc, argv, serve, call); }
