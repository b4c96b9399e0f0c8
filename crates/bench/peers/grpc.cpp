// gRPC's C++ library over a UNIX socket: blocking calls, and its synchronous server.
#include <grpcpp/grpcpp.h>

#include "peer.grpc.pb.h"
#include "peer.hpp"

namespace {

using grpc::ServerContext;
using grpc::Status;

void fill(bench::Bytes& to, int64_t n) {
    for (int64_t at = 0; at < n; at++) to.mutable_all()->push_back(char(peer::byte_at(at)));
}
void fill(bench::FixedSequence& to, int64_t n) {
    for (int64_t at = 0; at < n; at++) {
        auto one = to.add_all();
        one->set_left(peer::number_at(at)), one->set_right(peer::number_at(-at)), one->set_weight(peer::weight_at(at));
    }
}
void fill(bench::VariableSequence& to, int64_t n) {
    for (int64_t at = 0; at < n; at++) {
        auto one = to.add_all();
        one->set_text(peer::text_at(at)), one->set_weight(peer::weight_at(at));
    }
}

// The answer to a sequence, as the receiver of it computes it.
double result(const bench::Bytes& from) { return peer::byte_answer(from.all().size(), uint8_t(from.all().back())); }
template <class Sequence>
double result(const Sequence& from) {
    return peer::answer(from.all_size(), from.all(from.all_size() - 1).weight());
}

// Copies a sequence of the last length that a client asked for: a message of protobuf owns its elements.
template <class Sequence>
Status prepared(const bench::Count& asked, Sequence* to) {
    static Sequence kept;
    static int64_t count = 0;
    if (count != asked.count()) kept.Clear(), fill(kept, asked.count()), count = asked.count();
    *to = kept;
    return Status::OK;
}

struct Server final : bench::Peer::Service {
    Status Null(ServerContext*, const bench::Nothing*, bench::Nothing*) override { return Status::OK; }
    Status SendBytes(ServerContext*, const bench::Bytes* all, bench::Answer* to) override { return to->set_value(result(*all)), Status::OK; }
    Status SendFixed(ServerContext*, const bench::FixedSequence* all, bench::Answer* to) override {
        return to->set_value(result(*all)), Status::OK;
    }
    Status SendVariable(ServerContext*, const bench::VariableSequence* all, bench::Answer* to) override {
        return to->set_value(result(*all)), Status::OK;
    }
    Status ReceiveBytes(ServerContext*, const bench::Count* n, bench::Bytes* to) override { return prepared(*n, to); }
    Status ReceiveFixed(ServerContext*, const bench::Count* n, bench::FixedSequence* to) override { return prepared(*n, to); }
    Status ReceiveVariable(ServerContext*, const bench::Count* n, bench::VariableSequence* to) override { return prepared(*n, to); }
};

void good(const Status& status) {
    if (!status.ok()) throw std::runtime_error("gRPC: " + status.error_message());
}

int serve(const std::string& path) {
    Server service;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
    builder.SetMaxReceiveMessageSize(-1).SetMaxSendMessageSize(-1).RegisterService(&service);
    auto server = builder.BuildAndStart();
    if (!server) throw std::runtime_error("gRPC cannot listen on " + path);
    peer::ready();
    server->Wait();
    return 0;
}

using Stub = std::shared_ptr<bench::Peer::Stub>;

template <class Sequence>
peer::Call sending(Stub stub, Status (bench::Peer::Stub::*method)(grpc::ClientContext*, const Sequence&, bench::Answer*), int64_t n, double wanted) {
    auto all = std::make_shared<Sequence>();
    fill(*all, n);
    return [=] {
        grpc::ClientContext context;
        bench::Answer answer;
        good((stub.get()->*method)(&context, *all, &answer));
        peer::check(answer.value(), wanted);
    };
}

template <class Sequence>
peer::Call receiving(Stub stub, Status (bench::Peer::Stub::*method)(grpc::ClientContext*, const bench::Count&, Sequence*), int64_t n, double wanted) {
    return [=] {
        grpc::ClientContext context;
        bench::Count count;
        count.set_count(n);
        Sequence all;
        good((stub.get()->*method)(&context, count, &all));
        peer::check(result(all), wanted);
    };
}

int call(const std::string& path) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    Stub stub = bench::Peer::NewStub(grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), arguments));
    return peer::answer_orders([stub](const peer::Order& order) -> peer::Call {
        using S = bench::Peer::Stub;
        const int64_t n = order.elements;
        if (order.kind == "null") {
            return [=] {
                grpc::ClientContext context;
                bench::Nothing to;
                good(stub->Null(&context, bench::Nothing(), &to));
            };
        }
        const double wanted = peer::expected(order.kind, n);
        if (order.kind == "byte") return order.sends() ? sending(stub, &S::SendBytes, n, wanted) : receiving(stub, &S::ReceiveBytes, n, wanted);
        if (order.kind == "fixed") return order.sends() ? sending(stub, &S::SendFixed, n, wanted) : receiving(stub, &S::ReceiveFixed, n, wanted);
        return order.sends() ? sending(stub, &S::SendVariable, n, wanted) : receiving(stub, &S::ReceiveVariable, n, wanted);
    });
}

}  // namespace

int main(int argc, char** argv) { return peer::run(argc, argv, serve, call); }
