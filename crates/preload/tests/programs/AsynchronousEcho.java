// A server that sends back what it gets, and a client that checks it, both with asynchronous channels: their threads wait in an epoll set
// to which others add connections with EPOLLONESHOT. With SECONDS the client does the same again and again for so long, each time over new
// connections. Usage: AsynchronousEcho server ADDRESS PORT, AsynchronousEcho client ADDRESS PORT [SECONDS]
import java.net.InetSocketAddress;
import java.net.StandardSocketOptions;
import java.nio.ByteBuffer;
import java.nio.channels.AsynchronousServerSocketChannel;
import java.nio.channels.AsynchronousSocketChannel;
import java.nio.channels.CompletionHandler;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.zip.CRC32;

public class AsynchronousEcho {
    static final int CONNECTIONS = 6;
    static final int QUESTIONS = 500;

    public static void main(String[] arguments) throws Exception {
        InetSocketAddress address = new InetSocketAddress(arguments[1], Integer.parseInt(arguments[2]));
        if (arguments[0].equals("server")) {
            serve(address);
        } else {
            long end = System.nanoTime() + 1_000_000_000L * (arguments.length > 3 ? Long.parseLong(arguments[3]) : 0);
            do {
                ask(address);
            } while (System.nanoTime() < end);
            System.exit(0);
        }
    }

    /** Ends the program when something fails: nobody waits for what cannot come. */
    abstract static class Then<T> implements CompletionHandler<T, Void> {
        @Override public void failed(Throwable why, Void nothing) {
            if (!(why instanceof java.nio.channels.AsynchronousCloseException)) {
                why.printStackTrace();
                System.exit(1);
            }
        }
    }

    static void serve(InetSocketAddress address) throws Exception {
        AsynchronousServerSocketChannel listener = AsynchronousServerSocketChannel.open();
        listener.setOption(StandardSocketOptions.SO_REUSEADDR, true);
        listener.bind(address);
        listener.accept(null, new Then<AsynchronousSocketChannel>() {
            @Override public void completed(AsynchronousSocketChannel channel, Void nothing) {
                listener.accept(null, this);
                new Echo(channel).read();
            }
        });
        Thread.currentThread().join();
    }

    static class Echo {
        final AsynchronousSocketChannel channel;
        final ByteBuffer buffer = ByteBuffer.allocate(8192);

        Echo(AsynchronousSocketChannel channel) {
            this.channel = channel;
        }

        void read() {
            buffer.clear();
            channel.read(buffer, null, new Then<Integer>() {
                @Override public void completed(Integer count, Void nothing) {
                    if (count < 0) {
                        close(channel);
                        return;
                    }
                    buffer.flip();
                    write();
                }
            });
        }

        void write() {
            channel.write(buffer, null, new Then<Integer>() {
                @Override public void completed(Integer count, Void nothing) {
                    if (buffer.hasRemaining()) {
                        write();
                    } else {
                        read();
                    }
                }
            });
        }
    }

    static void close(AsynchronousSocketChannel channel) {
        try {
            channel.close();
        } catch (java.io.IOException why) {
            throw new RuntimeException(why);
        }
    }

    static void ask(InetSocketAddress address) throws Exception {
        CountDownLatch running = new CountDownLatch(CONNECTIONS);
        Questions[] all = new Questions[CONNECTIONS];
        for (int i = 0; i < CONNECTIONS; i++) {
            AsynchronousSocketChannel channel = AsynchronousSocketChannel.open();
            channel.connect(address).get();
            all[i] = new Questions(channel, i, running);
            all[i].next();
        }
        if (!running.await(1000, TimeUnit.SECONDS)) {
            for (Questions one : all) {
                System.err.println("connection " + one.number + " has " + one.asked + " answers");
            }
            System.exit(2);
        }
        for (Questions one : all) {
            System.out.println(one.number + ": " + one.asked + " answers, " + Long.toHexString(one.sum.getValue()));
        }
    }

    static class Questions {
        final AsynchronousSocketChannel channel;
        final int number;
        final CountDownLatch running;
        final CRC32 sum = new CRC32();
        volatile int asked;
        ByteBuffer question;
        ByteBuffer answer;

        Questions(AsynchronousSocketChannel channel, int number, CountDownLatch running) {
            this.channel = channel;
            this.number = number;
            this.running = running;
        }

        void next() {
            if (asked == QUESTIONS) {
                close(channel);
                running.countDown();
                return;
            }
            byte[] bytes = new byte[1 + (asked * 7919 + number * 31) % 9000];
            for (int i = 0; i < bytes.length; i++) {
                bytes[i] = (byte) ((i + 1) * (asked + 3) * (number + 5) >> 3);
            }
            question = ByteBuffer.wrap(bytes);
            answer = ByteBuffer.allocate(bytes.length);
            // The answer is waited for before there is any: its thread adds the connection to the set.
            read();
            write();
        }

        void write() {
            channel.write(question, null, new Then<Integer>() {
                @Override public void completed(Integer count, Void nothing) {
                    if (question.hasRemaining()) {
                        write();
                    } else {
                        done();
                    }
                }
            });
        }

        void read() {
            channel.read(answer, null, new Then<Integer>() {
                @Override public void completed(Integer count, Void nothing) {
                    if (count < 0) {
                        failed(new java.io.EOFException("connection " + number), null);
                    } else if (answer.hasRemaining()) {
                        read();
                    } else {
                        done();
                    }
                }
            });
        }

        int halves;

        /** Whichever of the two is done last goes on. */
        void done() {
            synchronized (this) {
                halves++;
                if (halves < 2) {
                    return;
                }
                halves = 0;
            }
            if (!java.util.Arrays.equals(question.array(), answer.array())) {
                System.err.println("connection " + number + ", question " + asked + ": a wrong answer");
                System.exit(3);
            }
            sum.update(answer.array());
            asked++;
            next();
        }
    }
}
